// The extension module winnow._winnow.
#include <nanobind/nanobind.h>

#include "call.h"
#include "messages.h"
#include "winnow/error.h"

namespace winnow::python {

namespace {

void translate(const std::exception_ptr& caught, void*) {
  try {
    std::rethrow_exception(caught);
  } catch (const Error& e) {
    PyObject* type = e.code() == ErrorCode::kInvalidArgument ? PyExc_ValueError
                     : e.code() == ErrorCode::kUnsupported   ? PyExc_NotImplementedError
                                                             : PyExc_RuntimeError;
    PyErr_SetString(type, in_python(e.what()).c_str());
  }
}

}  // namespace

}  // namespace winnow::python

// Under a name of its own, so that PyInit__winnow below comes before anything of nanobind's.
NB_MODULE(_winnow_bindings, m) {
  using namespace winnow::python;
  m.doc() = "winnow: sparse MLA attention. Arrays of any library, without copies.";
  nb::register_exception_translator(translate);
  // A process may end while a thread is inside a call, whose arguments then are never released: no
  // leak to report on the user's screen.
  nb::set_leak_warnings(false);
  bind_model(m);
  bind_planning(m);
  bind_plan(m);
  bind_layers(m);
  bind_write(m);
  bind_fused(m);
  bind_score(m);
  bind_ranks(m);
  bind_attend(m);
  bind_lists(m);
  bind_absorb(m);
  bind_pipeline(m);
}

// The entry. nanobind keeps its state once per process: an import in a second interpreter would put
// that interpreter's objects in place of the first one's, whose calls then fail.
extern "C" NB_EXPORT PyObject* PyInit__winnow() {
  if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
    PyErr_SetString(PyExc_ImportError,
                    "winnow: expected the main interpreter, found a subinterpreter; winnow can be "
                    "imported in one interpreter of a process");
    return nullptr;
  }
  return PyInit__winnow_bindings();
}
