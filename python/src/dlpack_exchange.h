// The C function table of DLPack's fast exchange (`__dlpack_c_exchange_api__`, DLPack 1.2): a
// library puts it on its array type, and a consumer reads views, the current stream and new arrays
// through it in tens of nanoseconds, without a Python call. PyTorch 2.10 and newer have it.
// Layout as in the DLPack specification; tensors and dtypes are nanobind's.
#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>

namespace winnow::python {

namespace nb = nanobind;

struct DlpackVersion {
  uint32_t major, minor;
};

struct DlpackManaged {  // DLManagedTensorVersioned; opaque here, passed from allocator to importer
  DlpackVersion version;
};

using DlpackSetError = void (*)(void* context, const char* kind, const char* message);

struct DlpackExchange {
  DlpackVersion version;
  DlpackExchange* previous;
  int (*allocate)(nb::dlpack::dltensor* prototype, DlpackManaged** out, void* context,
                  DlpackSetError set_error);
  int (*managed_from_object)(void* object, DlpackManaged** out);
  int (*object_from_managed)(DlpackManaged* tensor, void** out);   // takes the tensor over
  int (*view_of_object)(void* object, nb::dlpack::dltensor* out);  // borrowed; may be null
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

}  // namespace winnow::python
