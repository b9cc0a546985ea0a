// Rooms and namespaces: src/<room>/ is winnow::internal::<room>. What core/ and model/ hold is
// common ground, which every file of the library names without a prefix.
#pragma once

namespace winnow {

namespace internal::core {}
namespace internal::model {}

using namespace internal::core;
using namespace internal::model;

}  // namespace winnow
