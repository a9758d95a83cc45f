// The Python module: the kernel in single and in double precision.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace einsight {
namespace in_float { void define(nb::module_ &); }
namespace in_double { void define(nb::module_ &); }
}  // namespace einsight

NB_MODULE(_native, m) {
  einsight::in_float::define(m);
  nb::module_ wide = m.def_submodule("wide");
  einsight::in_double::define(wide);
}
