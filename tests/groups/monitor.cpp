// A thread like the monitor of torch's nccl groups: it asks a store that is written in Python again and again, and no error
// of the store ends it. Nobody tells it that the interpreter exits.
#include <Python.h>
#include <pthread.h>

#include <future>
#include <thread>

extern "C" void watch(PyObject* store) {
    Py_INCREF(store);
    std::promise<void> named;  // before the program goes on: it may exit at once, and threads are found by name
    const std::future<void> is_named = named.get_future();
    std::thread([store, named = std::move(named)]() mutable {
        pthread_setname_np(pthread_self(), "pt_nccl_heartbt");
        named.set_value();
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
    is_named.wait();
}
