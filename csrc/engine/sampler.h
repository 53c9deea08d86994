#pragma once
#include <cstdint>
#include <vector>
#include "kernels/kernels.h"
#include "step.h"
namespace sterna {
struct SamplingOptions { float temperature=1; int32_t top_k=0; float top_p=1,min_p=0,repetition=1,presence=0,frequency=0; uint64_t seed=0; int32_t min_new_tokens=0; std::vector<int32_t> end_ids,bias_ids; std::vector<float> bias_values; int32_t top_logprobs=-1; };
struct SamplerScratch {};
struct SampledToken { int32_t token; bool nan; TokenLogprobs logprobs; };
class Sampler { public: Sampler(int v,const Kernels& k):v_(v),k_(k){} void bind(int,const SamplingOptions&,const int32_t*,size_t,const int32_t*,size_t){} void release(int){} bool is_bound(int)const{return true;} bool wants_logprobs(int)const{return false;} void set_mask(int,const uint32_t*,size_t){} SampledToken sample(int,float*l,SamplerScratch&){ Maximum m=k_.maximum(l,v_); return {m.index,m.has_nan,{}}; } int v_; const Kernels&k_; };
}
