/*
 * The module _heads: finds heads of HTTP/1.1, and splits off values that mostly differ.
 *
 * It knows no rule of HTTP: HeadParser has parsed the rest of a head before, or else parses all.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <string.h>

/* Return the size of a head including the empty line at its end; 0 if the text has no end of one. */
static Py_ssize_t
head_size(const char *text, Py_ssize_t size)
{
    const char *at = text, *end = text + size;
    while ((at = memchr(at, '\n', (size_t)(end - at))) != NULL) {
        at++;
        if (end - at < 2)
            break;
        if (at - text > 1 && at[-2] == '\r' && at[0] == '\r' && at[1] == '\n')
            return at + 2 - text;
    }
    return 0;
}

/* Return the rest of data: as bytes if all of it is small, else as a view. */
static PyObject *
rest_of(PyObject *data, const Py_buffer *buffer, Py_ssize_t start, bool is_small)
{
    if (is_small)
        return PyBytes_FromStringAndSize((const char *)buffer->buf + start, buffer->len - start);
    PyObject *view = PyMemoryView_FromObject(data);
    if (view == NULL)
        return NULL;
    PyObject *rest = PySequence_GetSlice(view, start, buffer->len);
    Py_DECREF(view);
    return rest;
}

PyDoc_STRVAR(cut_head_doc,
"cut_head(data, most, /)\n-> tuple[bytes, bytes | memoryview] | None\n\n"
"Return a head at the start of data, and the rest: a view if the data have more than most bytes.\n\n"
"None if it does not end within most bytes, or if the data begin with the end of a line.");

static PyObject *
cut_head(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given)
{
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "cut_head takes two arguments");
        return NULL;
    }
    Py_ssize_t most = PyLong_AsSsize_t(arguments[1]);
    if (most == -1 && PyErr_Occurred())
        return NULL;
    Py_buffer data;
    if (PyObject_GetBuffer(arguments[0], &data, PyBUF_SIMPLE) < 0)
        return NULL;
    const char *text = data.buf;
    bool is_small = data.len <= most;
    Py_ssize_t size = 0;
    if (data.len > 0 && text[0] != '\r' && text[0] != '\n')
        size = head_size(text, is_small ? data.len : most < 0 ? 0 : most);
    PyObject *result = NULL;
    if (size == 0) {
        result = Py_NewRef(Py_None);
    } else {
        PyObject *head = PyBytes_FromStringAndSize(text, size);
        PyObject *rest = rest_of(arguments[0], &data, size, is_small);
        if (head != NULL && rest != NULL)
            result = PyTuple_Pack(2, head, rest);
        Py_XDECREF(head);
        Py_XDECREF(rest);
    }
    PyBuffer_Release(&data);
    return result;
}

/* Tell whether a text is a name in lower case, whatever its case. */
static bool
is_name(const char *text, Py_ssize_t size, PyObject *name)
{
    if (!PyBytes_Check(name) || PyBytes_GET_SIZE(name) != size)
        return false;
    const char *lower = PyBytes_AS_STRING(name);
    for (Py_ssize_t at = 0; at < size; at++) {
        if (Py_TOLOWER(text[at]) != (unsigned char)lower[at])
            return false;
    }
    return true;
}

/* Return where the value of a line begins whose name is one of these; NULL for other lines. */
static const char *
noted_value(const char *line, const char *end, PyObject *names)
{
    const char *colon = memchr(line, ':', (size_t)(end - line));
    for (Py_ssize_t index = 0; colon != NULL && index < PyTuple_GET_SIZE(names); index++) {
        if (is_name(line, colon - line, PyTuple_GET_ITEM(names, index)))
            return colon + 1 + (colon[1] == ' '); /* as nearly all write it */
    }
    return NULL;
}

/* Tell whether a value is not empty, has only printable ASCII, and no space around it. */
static bool
is_plain(const char *value, const char *end)
{
    if (value >= end || *value == ' ' || end[-1] == ' ')
        return false;
    unsigned char wrong = 0;
    for (; value < end; value++)
        wrong |= (unsigned char)((unsigned char)*value - ' ') > '~' - ' ';
    return !wrong;
}

/* Append an object to a list, and drop it; false with an error set if that fails. */
static bool
append(PyObject *list, PyObject *object)
{
    bool works = object != NULL && PyList_Append(list, object) == 0;
    Py_XDECREF(object);
    return works;
}

/*
 * Copy header lines without the values of those noted, which go to a list with their lines. Return
 * where the copy ends; NULL if a line has no end, or if such a value is not plain, or with an error
 * set.
 */
static char *
copy_lines(const char *at, const char *end, PyObject *names, char *to, PyObject *values)
{
    while (at < end) {
        const char *next = memchr(at, '\n', (size_t)(end - at));
        if (next++ == NULL)
            return NULL;
        const char *value = noted_value(at, next, names), *stop = next - 2;
        if (value != NULL) {
            if (*stop != '\r' || !is_plain(value, stop)
                || !append(values, PyUnicode_DecodeASCII(value, stop - value, NULL))
                || !append(values, PyBytes_FromStringAndSize(at, next - at)))
                return NULL;
            memcpy(to, at, (size_t)(value - at));
            to += value - at;
            at = stop;
        }
        memcpy(to, at, (size_t)(next - at));
        to += next - at;
        at = next;
    }
    return to;
}

PyDoc_STRVAR(split_head_doc,
"split_head(head, names, /) -> tuple[bytes, bytes, list[str | bytes]] | None\n\n"
"Return the first line of a head without its LF, and the text of its headers without the values\n"
"of those with these names in lower case. Of each of them in order, follow the value and the\n"
"line.\n\n"
"None if such a value is not plain: empty, not printable ASCII, or in more space than the usual\n"
"one.");

static PyObject *
split(const char *head, const char *end, PyObject *names)
{
    const char *start = memchr(head, '\n', (size_t)(end - head));
    if (start == NULL)
        return Py_NewRef(Py_None);
    PyObject *first = PyBytes_FromStringAndSize(head, start - head);
    PyObject *text = PyBytes_FromStringAndSize(NULL, end - ++start), *values = PyList_New(0);
    PyObject *result = NULL;
    if (first != NULL && text != NULL && values != NULL) {
        char *to = PyBytes_AS_STRING(text);
        char *stop = copy_lines(start, end, names, to, values);
        if (stop == NULL)
            result = PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        else if (_PyBytes_Resize(&text, stop - to) == 0)
            result = PyTuple_Pack(3, first, text, values);
    }
    Py_XDECREF(first);
    Py_XDECREF(text);
    Py_XDECREF(values);
    return result;
}

static PyObject *
split_head(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given)
{
    if (given != 2 || !PyTuple_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "split_head takes bytes and a tuple");
        return NULL;
    }
    Py_buffer head;
    if (PyObject_GetBuffer(arguments[0], &head, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *result = split(head.buf, (const char *)head.buf + head.len, arguments[1]);
    PyBuffer_Release(&head);
    return result;
}

static PyMethodDef functions[] = {
    {"cut_head", (PyCFunction)(void (*)(void))cut_head, METH_FASTCALL, cut_head_doc},
    {"split_head", (PyCFunction)(void (*)(void))split_head, METH_FASTCALL, split_head_doc},
    {NULL, NULL, 0, NULL},
};

static int
add_version(PyObject *module)
{
    /* Of gateway/http1/native/__init__.py, which has this too. */
    return PyModule_AddIntConstant(module, "VERSION", 1);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_version},
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_heads",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__heads(void)
{
    return PyModuleDef_Init(&definition);
}
