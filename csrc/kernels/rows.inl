// Rows of float32: norms, sums, activations, rotary positions. Contracts in kernels.h.

static void rms_norm(const float* x, const float* weight, int n, float eps, float* y) {
  Lanes squares = zero();
  for_lanes(n, [&](int i, int count) STERNA_BODY {
    const Lanes v = load(x + i, count);
    squares = fma(v, v, squares);
  });
  const Lanes r = set1(1.0f / __builtin_sqrtf(reduce_add(squares) / float(n) + eps));
  for_lanes(n, [&](int i, int count) STERNA_BODY { store(y + i, mul(mul(load(x + i, count), r), load(weight + i, count)), count); });
}

static void add_row(float* x, const float* y, int n) {
  for_lanes(n, [&](int i, int count) STERNA_BODY { store(x + i, add(load(x + i, count), load(y + i, count)), count); });
}

static void add_scaled_row(float* x, const float* y, float scale, int n) {
  for_lanes(n, [&](int i, int count) STERNA_BODY { store(x + i, fma(load(y + i, count), set1(scale), load(x + i, count)), count); });
}

static void scale_row(float* x, float factor, int n) {
  for_lanes(n, [&](int i, int count) STERNA_BODY { store(x + i, mul(load(x + i, count), set1(factor)), count); });
}

static void softcap_row(float* x, float cap, int n) {
  for_lanes(n, [&](int i, int count) STERNA_BODY { store(x + i, softcap(load(x + i, count), cap), count); });
}

STERNA_INLINE Lanes silu(Lanes x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

STERNA_INLINE Lanes gelu(Lanes x) { return mul(mul(set1(0.5f), x), add(set1(1.0f), erf(mul(x, set1(0.70710678f))))); }

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), the constants multiplied out.
STERNA_INLINE Lanes gelu_tanh(Lanes x) {
  const Lanes inner = mul(x, fma(mul(x, x), set1(0.035677408f), set1(0.79788456f)));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

static void gated(const float* gate, const float* up, int n, Activation activation, float* y) {
  auto with = [&](auto act) {
    for_lanes(n, [&](int i, int count) STERNA_BODY { store(y + i, mul(act(load(gate + i, count)), load(up + i, count)), count); });
  };
  switch (activation) {
    case Activation::kSilu: return with([](Lanes x) STERNA_BODY { return silu(x); });
    case Activation::kGelu: return with([](Lanes x) STERNA_BODY { return gelu(x); });
    case Activation::kGeluTanh: return with([](Lanes x) STERNA_BODY { return gelu_tanh(x); });
  }
}

static void rope(float* x, int heads, int head_dim, int half, const float* cosines, const float* sines) {
  for (int head = 0; head < heads; head++) {
    float* first_half = x + size_t(head) * head_dim;
    float* second_half = first_half + half;
    for_lanes(half, [&](int i, int count) STERNA_BODY {
      const Lanes a = load(first_half + i, count), b = load(second_half + i, count);
      const Lanes c = load(cosines + i, count), s = load(sines + i, count);
      store(first_half + i, fma(a, c, sub(zero(), mul(b, s))), count);
      store(second_half + i, fma(b, c, mul(a, s)), count);
    });
  }
}

static void fill_rows(Kernels& k) {
  k.rms_norm = rms_norm;
  k.add = add_row;
  k.add_scaled = add_scaled_row;
  k.scale = scale_row;
  k.softcap = softcap_row;
  k.gated = gated;
  k.rope = rope;
}
