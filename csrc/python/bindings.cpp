// ringway._core: each part of the native core binds itself.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_device(nb::module_& m);
void bind_group(nb::module_& m);
void bind_pack(nb::module_& m);
void bind_recorder(nb::module_& m);
void bind_responder(nb::module_& m);
void bind_shm(nb::module_& m);
void bind_shm_device(nb::module_& m);

NB_MODULE(_core, m) {
    m.doc() = "ringway's native core";
    nb::set_leak_warnings(false);  // objects alive at interpreter exit belong to jobs that did not shut down
    bind_pack(m);
    bind_recorder(m);
    bind_group(m);
    bind_device(m);
    bind_responder(m);
    bind_shm(m);
    bind_shm_device(m);
}
