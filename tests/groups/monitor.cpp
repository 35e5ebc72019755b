// A thread like the monitor of torch's nccl groups: it asks a store that is written in Python again and again, and no error
// of the store ends it. Nobody tells it that the interpreter exits.
#include <Python.h>
#include <pthread.h>

#include <thread>

extern "C" void watch(PyObject* store) {
    Py_INCREF(store);
    std::thread([store] {
        pthread_setname_np(pthread_self(), "pt_nccl_heartbt");
        for (;;) {
            try {
                const PyGILState_STATE state = PyGILState_Ensure();
                PyObject* const known = PyObject_CallMethod(store, "check", "([s])", "exception_dump");
                if (known == nullptr) PyErr_Clear();
                Py_XDECREF(known);
                PyGILState_Release(state);
            } catch (...) {
            }
        }
    }).detach();
}
