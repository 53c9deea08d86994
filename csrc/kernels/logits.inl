// What sampling asks of a row of logits. Contracts in kernels.h.

static Maximum maximum(const float* x, int n) {
  Lanes best = set1(-kInfinity);
  uint32_t nans = 0;
  for_lanes(n, [&](int i, int count) STERNA_BODY {
    const Lanes v = load(x + i, count);
    nans |= bits(unordered(v, v));
    best = max(select(first(count), v, best), best);
  });
  const Lanes value = set1(reduce_max(best));
  for (int i = 0; i < n; i += kLanes) {
    const int count = n - i < kLanes ? n - i : kLanes;
    const uint32_t found = bits(both(first(count), less_equal(value, load(x + i, count))));
    if (found) {
      const int index = i + __builtin_ctz(found);
      return {x[index], index, nans != 0};
    }
  }
  return {-kInfinity, 0, nans != 0};  // nothing but NaN
}

static double exp_sum(const float* x, int n, float maximum) {
  constexpr int kChunk = 1024;
  double total = 0;
  for (int start = 0; start < n; start += kChunk) {
    const float* chunk = x + start;
    Lanes sum = zero();
    for_lanes(n - start < kChunk ? n - start : kChunk, [&](int i, int count) STERNA_BODY {
      sum = add(sum, select(first(count), exp(sub(load(chunk + i, count), set1(maximum))), zero()));
    });
    total += double(reduce_add(sum));
  }
  return total;
}

static void fill_logits(Kernels& k) {
  k.maximum = maximum;
  k.exp_sum = exp_sum;
}
