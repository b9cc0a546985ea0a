// The extension module winnow._winnow.
#include <nanobind/nanobind.h>

#include "call.h"
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
    PyErr_SetString(type, e.what());
  }
}

}  // namespace

}  // namespace winnow::python

NB_MODULE(_winnow, m) {
  using namespace winnow::python;
  m.doc() = "winnow: sparse MLA attention. Arrays of any library, without copies.";
  nb::register_exception_translator(translate);
  // A process may end while a thread is inside a call, whose arguments then are never released: no
  // leak to report on the user's screen.
  nb::set_leak_warnings(false);
  bind_model(m);
  bind_planning(m);
  bind_plan(m);
  bind_write(m);
  bind_score(m);
  bind_attend(m);
  bind_lists(m);
  bind_absorb(m);
  bind_pipeline(m);
}
