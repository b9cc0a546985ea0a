// How values become e4m3 codes.
#pragma once

#include <cstdint>

namespace winnow {

// How a tile's scale is found from its largest magnitude. Readers accept every mode. V4's two modes
// differ for tiles below 0.0448 alone, and engines for V4 differ in them: FlashMLA and vLLM's
// compressor on CUDA have kPow2, vLLM's insertion into the window and SGLang kPow2FloorAmax.
enum class ScaleMode : uint8_t {
  kDefault,  // V3.2: kAmax, V4: kPow2, index keys: kPow2
  kAmax,     // V3.2: s = max(amax/448, FLT_MIN); index keys: s = max(amax, 1e-4)/448
  kPow2,     // V3.2, V4: s = 2^ceil(log2(max(amax/448, 1e-4))); index keys: of max(amax, 1e-4)/448
  kPow2FloorAmax,  // V4 only: s = 2^ceil(log2(max(amax, 1e-4)/448))
};

}  // namespace winnow
