// Sixteen float lanes.
#pragma once
