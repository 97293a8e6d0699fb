/* What the files share that make Python functions of the conversions. */
#ifndef PYTHON_H
#define PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

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

/* Return bytes with room for the elements of a text; NULL with an error set if that fails. */
PyObject *new_elements(const Py_buffer *text, int datatype);

/* Tell whether data are whole elements that can be written; sets ValueError if not. */
bool are_elements(const Py_buffer *data, int datatype, int nonfinite);

/*
 * Return bytes with room for a comma, the text of elements, and more; NULL with an error set if it
 * fails.
 */
PyObject *new_text(const Py_buffer *data, int datatype, size_t more);

/* Write a comma if others come before; return where to go on. */
static inline char *
after_comma(char *to, bool continued)
{
    if (continued)
        *to++ = ',';
    return to;
}

/* Return a new bytes object cut to its size, or None if that is below 0; NULL is an error. */
static inline PyObject *
resized_or_none(PyObject *bytes, Py_ssize_t size)
{
    if (size >= 0)
        _PyBytes_Resize(&bytes, size); /* sets the error if it fails */
    else
        Py_SETREF(bytes, Py_NewRef(Py_None));
    return bytes;
}

/* The functions of the module, from number_functions.c, string_functions.c, split_document.c. */
extern PyMethodDef number_functions[], string_functions[], document_functions[];

/* Add the types ThreadPool and Conversion to the module; -1 with an error set if that fails. */
int add_thread_pool(PyObject *module);

#endif
