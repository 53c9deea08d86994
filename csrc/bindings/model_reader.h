// A model out of Python's hands: `executor/native/plan.py` says it in dictionaries, which are read, and their shapes checked, here.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "engine/model.h"

namespace sterna {

// A matrix over memory that Python owns.
struct BoundMatrix {
  Matrix matrix;
  nanobind::object owner;
};

// Throws std::invalid_argument naming the entry that is missing or of the wrong shape. The arrays must outlive the model.
Model read_model(const nanobind::dict& config);

}  // namespace sterna
