/*
 * The module _native: conversions between JSON text and binary elements.
 *
 * Each conversion is a plain C function, which allocates nothing and knows nothing of Python.
 * Here, arguments become pointers and sizes, and the interpreter's lock is released meanwhile.
 */
#include "python.h"

#include "datatypes.h"

const char *const DATATYPE_NAMES[DATATYPE_COUNT] = {
    [BOOL] = "BOOL",     [UINT8] = "UINT8", [UINT16] = "UINT16", [UINT32] = "UINT32",
    [UINT64] = "UINT64", [INT8] = "INT8",   [INT16] = "INT16",   [INT32] = "INT32",
    [INT64] = "INT64",   [FP16] = "FP16",   [FP32] = "FP32",     [FP64] = "FP64",
    [BF16] = "BF16",
};

const unsigned char ELEMENT_SIZES[DATATYPE_COUNT] = {
    [BOOL] = 1, [UINT8] = 1, [UINT16] = 2, [UINT32] = 4, [UINT64] = 8, [INT8] = 1, [INT16] = 2,
    [INT32] = 4, [INT64] = 8, [FP16] = 2, [FP32] = 4, [FP64] = 8, [BF16] = 2,
};

static int
add_datatypes(PyObject *module)
{
    PyObject *names = PyTuple_New(DATATYPE_COUNT);
    if (names == NULL)
        return -1;
    for (int code = 0; code < DATATYPE_COUNT; code++) {
        PyObject *name = PyUnicode_FromString(DATATYPE_NAMES[code]);
        if (name == NULL) {
            Py_DECREF(names);
            return -1;
        }
        PyTuple_SET_ITEM(names, code, name);
    }
    int failed = PyModule_AddObjectRef(module, "DATATYPES", names);
    Py_DECREF(names);
    return failed;
}

static int
add_functions(PyObject *module)
{
    /* Of gateway/codec/native/__init__.py, which has this too. */
    if (PyModule_AddIntConstant(module, "VERSION", 4) < 0)
        return -1;
    if (PyModule_AddFunctions(module, number_functions) < 0)
        return -1;
    if (PyModule_AddFunctions(module, document_functions) < 0)
        return -1;
    return PyModule_AddFunctions(module, string_functions);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_datatypes},
    {Py_mod_exec, add_functions},
    {Py_mod_exec, add_thread_pool},
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
