#include "dispatch.h"

#include <stdexcept>

#if defined(STERNA_HAS_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sterna {

void make_kernels_portable(Kernels& k);
void make_kernels_avx2(Kernels& k);
void make_kernels_avx512vnni(Kernels& k);
void make_kernels_avx512(Kernels& k);
void make_kernels_amx(Kernels& k);
void make_kernels_amx_int8(Kernels& k);
void make_kernels_amx_emulated(Kernels& k);
void make_kernels_amx_int8_emulated(Kernels& k);

namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }

bool has_avx512vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

bool has_avx512() { return has_avx512vnni() && __builtin_cpu_supports("avx512bf16"); }
#endif

#if defined(STERNA_HAS_AMX)
// Tiles are the processor's and then the kernel's to give: a process asks once, for all its threads to come.
bool has_amx() {
#if defined(__linux__)
  unsigned a = 7, b, c = 0, d;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  const bool tile = d >> 24 & 1, int8 = d >> 25 & 1, bf16 = d >> 22 & 1;
  static const bool granted = tile && int8 && bf16 && has_avx512() && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
  return granted;
#else
  return false;
#endif
}
#endif

std::vector<Kernels> make_tables() {
  std::vector<Kernels> tables;
  auto add = [&tables](void (*make)(Kernels&)) { make(tables.emplace_back()); };
#if defined(STERNA_HAS_AMX)
  if (has_amx()) add(make_kernels_amx), add(make_kernels_amx_int8);
#endif
#if defined(STERNA_HAS_AVX512)
  if (has_avx512()) add(make_kernels_avx512);
#endif
#if defined(STERNA_HAS_AVX512VNNI)
  if (has_avx512vnni()) add(make_kernels_avx512vnni);
#endif
#if defined(STERNA_HAS_AVX2)
  if (has_avx2()) add(make_kernels_avx2);
#endif
  add(make_kernels_portable);
#if defined(STERNA_HAS_AMX_EMULATED)
  if (has_avx512()) add(make_kernels_amx_emulated), add(make_kernels_amx_int8_emulated);  // last: for tests
#endif
  return tables;
}

const std::vector<Kernels>& tables() {
  static const std::vector<Kernels> made = make_tables();
  return made;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels& each : tables()) names.emplace_back(each.name);
  return names;
}

const Kernels& kernels_for(const std::string& isa) {
  std::string names;
  for (const Kernels& each : tables()) {
    if (isa == each.name) return each;
    names += (names.empty() ? "" : ", ") + std::string(each.name);
  }
  throw std::invalid_argument("no kernels for '" + isa + "' here (there are: " + names + ")");
}

}  // namespace sterna
