/*
 * The module _native: conversions between JSON text and binary elements.
 *
 * Each conversion is a plain C function, which allocates nothing and knows nothing of Python.
 * Here, arguments become pointers and sizes, and the interpreter's lock is released meanwhile.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "datatypes.h"
#include "decode_numbers.h"

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

enum { MIN_UNLOCKED = 4096 /* bytes: less is converted sooner than the lock changes hands */ };

/* Run a statement; without the interpreter's lock if it has much to do. */
#define RUN_UNLOCKED(size, statement)            \
    do {                                         \
        PyThreadState *thread = NULL;            \
        if ((size) >= MIN_UNLOCKED)              \
            thread = PyEval_SaveThread();        \
        statement;                               \
        if (thread != NULL)                      \
            PyEval_RestoreThread(thread);        \
    } while (0)

/* Tell whether a code is that of a datatype; sets ValueError if not. */
static int
is_datatype(int code)
{
    if (code >= 0 && code < DATATYPE_COUNT)
        return 1;
    PyErr_Format(PyExc_ValueError, "there is no datatype %d", code);
    return 0;
}

/* Return a new bytes object cut to its size, or None if that is below 0; NULL is an error. */
static PyObject *
resized_or_none(PyObject *bytes, Py_ssize_t size)
{
    if (size >= 0)
        _PyBytes_Resize(&bytes, size); /* sets the error if it fails */
    else
        Py_SETREF(bytes, Py_NewRef(Py_None));
    return bytes;
}

PyDoc_STRVAR(decode_numbers_doc,
"decode_numbers(text, datatype, open_before=0, open_after=0, /) -> bytes | None\n\n"
"Return the elements of a JSON array of numbers, nested or flat, in their binary form.\n\n"
"The text may lack open_before opening and open_after closing brackets. Bare NaN, Infinity\n"
"and -Infinity count as numbers of floats.\n"
"Returns None if the text is no such array, or if any number does not fit or is in doubt.\n"
"Raises ValueError for a datatype that is not the number of one in DATATYPES.");

static PyObject *
decode_numbers_in_python(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer text;
    int datatype, open_before = 0, open_after = 0;
    if (!PyArg_ParseTuple(arguments, "y*i|ii", &text, &datatype, &open_before, &open_after))
        return NULL;
    PyObject *elements = NULL;
    if (is_datatype(datatype))
        elements = PyBytes_FromStringAndSize(
            NULL, (Py_ssize_t)most_elements((size_t)text.len) * ELEMENT_SIZES[datatype]);
    if (elements != NULL) {
        char *to = PyBytes_AS_STRING(elements);
        Py_ssize_t count;
        RUN_UNLOCKED(
            text.len,
            count = decode_numbers(
                text.buf, (size_t)text.len, (enum datatype)datatype, open_before, open_after, to));
        elements = resized_or_none(elements, count * ELEMENT_SIZES[datatype]);
    }
    PyBuffer_Release(&text);
    return elements;
}

static PyMethodDef methods[] = {
    {"decode_numbers", decode_numbers_in_python, METH_VARARGS, decode_numbers_doc},
    {NULL, NULL, 0, NULL},
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

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_datatypes},
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
