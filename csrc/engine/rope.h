// Angles of rotary embedding. Cosine and sine are the engine's own: every libm rounds some of them otherwise, and then a model's text would depend on it.
#pragma once

namespace sterna {

struct Turn {
  float cosine, sine;
};

// Of an angle in radians, |angle| <= 2^29: within 1 ulp (nearly always the nearest float32), and the same bits everywhere. NaN beyond that.
Turn turn_by(float angle);

}  // namespace sterna
