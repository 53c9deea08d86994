# What every source of the engine is compiled with.
set(STERNA_OPTIMIZE -O3 CACHE STRING "Level of optimization; a lower one is built sooner and gives the same bits")
option(STERNA_SANITIZE "AddressSanitizer and UndefinedBehaviorSanitizer" OFF)

# a*b+c is fused where the source says fma, and nowhere else: results must not depend on what a compiler fuses.
set(STERNA_FLAGS -Wall -Wextra -Wno-ignored-attributes -Wno-psabi -ffp-contract=off -fno-math-errno)
if(STERNA_SANITIZE)
  list(APPEND STERNA_FLAGS -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g)
endif()
