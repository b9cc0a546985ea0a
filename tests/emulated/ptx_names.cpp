// Names of PTX: types, special registers, the parts of an instruction's name.
#include <unordered_map>

#include "emulated/ptx.h"
#include "emulated/warp.h"

namespace winnow::emulated {

Type type_of(std::string_view name) {
  static const std::unordered_map<std::string_view, Type> known = {
      {"pred", Type::kPred},     {"b8", Type::kB8},         {"u8", Type::kU8},
      {"s8", Type::kS8},         {"b16", Type::kB16},       {"u16", Type::kU16},
      {"s16", Type::kS16},       {"f16", Type::kF16},       {"bf16", Type::kBf16},
      {"b32", Type::kB32},       {"u32", Type::kU32},       {"s32", Type::kS32},
      {"f32", Type::kF32},       {"b64", Type::kB64},       {"u64", Type::kU64},
      {"s64", Type::kS64},       {"f64", Type::kF64},       {"f16x2", Type::kF16x2},
      {"bf16x2", Type::kBf16x2}, {"u16x2", Type::kU16x2},   {"s16x2", Type::kS16x2},
      {"e4m3x2", Type::kE4m3x2}, {"e5m2x2", Type::kE5m2x2}, {"b128", Type::kB128}};
  const auto found = known.find(name);
  return found == known.end() ? Type::kNone : found->second;
}

int bytes_of(Type type) {
  switch (type) {
    case Type::kB8:
    case Type::kU8:
    case Type::kS8: return 1;
    case Type::kB16:
    case Type::kU16:
    case Type::kS16:
    case Type::kF16:
    case Type::kBf16:
    case Type::kE4m3x2:
    case Type::kE5m2x2: return 2;
    case Type::kB64:
    case Type::kU64:
    case Type::kS64:
    case Type::kF64: return 8;
    case Type::kB128: return 16;
    default: return 4;
  }
}

std::string_view part_of(std::string_view name, int number) {
  for (; number > 0; --number) {
    const size_t dot = name.find('.');
    if (dot == name.npos) return {};
    name.remove_prefix(dot + 1);
  }
  return name.substr(0, name.find('.'));
}
bool has_part(std::string_view name, std::string_view what) {
  for (int k = 0;; ++k) {
    const std::string_view part = part_of(name, k);
    if (part.empty()) return false;
    if (part == what) return true;
  }
}

int special_register(std::string_view name) {
  static const std::unordered_map<std::string_view, int> known = {
      {"%tid.x", kTidX},
      {"%tid.y", kTidY},
      {"%tid.z", kTidZ},
      {"%ntid.x", kNtidX},
      {"%ntid.y", kNtidY},
      {"%ntid.z", kNtidZ},
      {"%ctaid.x", kCtaidX},
      {"%ctaid.y", kCtaidY},
      {"%ctaid.z", kCtaidZ},
      {"%nctaid.x", kNctaidX},
      {"%nctaid.y", kNctaidY},
      {"%nctaid.z", kNctaidZ},
      {"%laneid", kLaneid},
      {"%warpid", kWarpid},
      {"%smid", kSmid},
      {"%cluster_ctarank", kClusterRank},
      {"%cluster_nctaid.x", kClusterSizeX},
      {"%cluster_nctaid.y", kClusterSizeY},
      {"%cluster_nctaid.z", kClusterSizeZ},
      {"%clusterid.x", kClusteridX},
      {"%clusterid.y", kClusteridY},
      {"%clusterid.z", kClusteridZ},
      {"%nclusterid.x", kNclusteridX},
      {"%lanemask_lt", kLanemaskLt},
      {"%lanemask_le", kLanemaskLe},
      {"%lanemask_gt", kLanemaskGt},
      {"%lanemask_ge", kLanemaskGe},
      {"%lanemask_eq", kLanemaskEq},
      {"%dynamic_smem_size", kDynamicSharedSize},
      {"%clock", kClock},
      {"%clock64", kClock64},
      {"%globaltimer", kGlobaltimer},
      {"%gridid", kGridid}};
  const auto found = known.find(name);
  return found == known.end() ? -1 : found->second;
}

}  // namespace winnow::emulated
