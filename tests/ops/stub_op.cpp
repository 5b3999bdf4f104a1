// An op that takes a second to compile: an empty Python module. Builds are tested with it.
#include <Python.h>

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define STRING_(x) #x
#define STRING(x) STRING_(x)

extern "C" PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() {
    static PyModuleDef definition = {
        PyModuleDef_HEAD_INIT, STRING(TORCH_EXTENSION_NAME), nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
    return PyModule_Create(&definition);
}
