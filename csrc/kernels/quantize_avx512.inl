// Two groups at once (quantize_group has what is computed): most of a group's work is in sums over its columns, and two share the shuffles.

// Each lane of a group's half: the larger of its own and of the lane that `imm` names.
template <int imm>
STERNA_INLINE __m512 larger_of(__m512 x) {
  return _mm512_max_ps(x, _mm512_permute_ps(x, imm));
}
template <int imm>
STERNA_INLINE __m512i sum_with(__m512i x) {
  return _mm512_add_epi32(x, _mm512_shuffle_epi32(x, _MM_PERM_ENUM(imm)));
}

// The 64 numbers at x become out[0] and out[1]. False, with nothing written, where one of these groups isn't of ordinary numbers.
STERNA_INLINE bool quantize_two(const float* x, ActivationGroup* out) {
  const __m512 part[4] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16), _mm512_loadu_ps(x + 32), _mm512_loadu_ps(x + 48)};
  const __m512 large[2] = {_mm512_max_ps(_mm512_abs_ps(part[0]), _mm512_abs_ps(part[1])), _mm512_max_ps(_mm512_abs_ps(part[2]), _mm512_abs_ps(part[3]))};
  // The lower half of the lanes is the first group's, the upper one the second's.
  __m512 maximum = _mm512_max_ps(_mm512_shuffle_f32x4(large[0], large[1], 0x44), _mm512_shuffle_f32x4(large[0], large[1], 0xee));
  maximum = _mm512_max_ps(maximum, _mm512_shuffle_f32x4(maximum, maximum, 0xb1));
  maximum = larger_of<0xb1>(larger_of<0x4e>(maximum));
  const __mmask16 nan = _mm512_cmp_ps_mask(part[0], part[1], _CMP_UNORD_Q) | _mm512_cmp_ps_mask(part[2], part[3], _CMP_UNORD_Q);
  const __mmask16 counts = _mm512_cmp_ps_mask(maximum, _mm512_set1_ps(kLeastMaximum), _CMP_GE_OQ);
  const __mmask16 ordinary = _mm512_mask_cmp_ps_mask(counts, maximum, _mm512_set1_ps(kInfinity), _CMP_LT_OQ);
  if (nan != 0 || ordinary != 0xffff) return false;

  const __m512 d = _mm512_div_ps(maximum, _mm512_set1_ps(127.0f)), factor = _mm512_div_ps(_mm512_set1_ps(127.0f), maximum);
  const __m512 factors[2] = {_mm512_shuffle_f32x4(factor, factor, 0x00), _mm512_shuffle_f32x4(factor, factor, 0xaa)};
  __m512i q[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) q[i] = _mm512_cvtps_epi32(_mm512_mul_ps(part[i], factors[i / 2]));
  // Packing works within 128 bits: in the first lie columns 0 to 3 of parts 0, 1, 2 and 3, in the second columns 4 to 7 of these, and so on.
  const __m512i packed = _mm512_packs_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3]));
  const __m512i codes = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), packed);

  // 128 bits are a half of a group: its sum, and the other's of the same group.
  const __m512i own = sum_with<0xb1>(sum_with<0x4e>(_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), codes)));
  const __m512i other = _mm512_shuffle_i32x4(own, own, 0xb1);
  // Of a group, in the order of its fields behind q: -, sum, first half, second half, sum, sum, first half, second half.
  __m512i sums = _mm512_mask_blend_epi32(0x4848, own, other);
  sums = _mm512_mask_blend_epi32(0x3333, sums, _mm512_add_epi32(own, other));
  const __m512 scaled = _mm512_mul_ps(d, _mm512_mask_blend_ps(0x0101, _mm512_cvtepi32_ps(sums), _mm512_set1_ps(1.0f)));
  const __m512i shifts = _mm512_setr_epi32(0, 0, 0, 0, 3, 7, 7, 7, 0, 0, 0, 0, 3, 7, 7, 7);
  const __m512i zeros = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_sllv_epi32(sums, shifts));
  const __m512i fields = _mm512_mask_blend_epi32(0xf0f0, _mm512_castps_si512(scaled), zeros);
  _mm512_store_si512(out, _mm512_shuffle_i32x4(codes, fields, 0x44));
  _mm512_store_si512(out + 1, _mm512_shuffle_i32x4(codes, fields, 0xee));
  return true;
}
