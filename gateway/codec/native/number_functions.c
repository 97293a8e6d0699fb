/* The functions of the module for numbers: see module.c. */
#include "python.h"

#include <limits.h>
#include <stdbool.h>

#include "datatypes.h"
#include "decode_numbers.h"
#include "encode_numbers.h"
#include "scan_numbers.h"

/* Tell whether a code is that of a datatype; sets ValueError if not. */
static bool
is_datatype(int code)
{
    if (code >= 0 && code < DATATYPE_COUNT)
        return true;
    PyErr_Format(PyExc_ValueError, "there is no datatype %d", code);
    return false;
}

/* Return a number as an int; -1, which is nothing's number, if it is none. */
static int
as_int(Py_ssize_t number)
{
    return number < 0 || number > INT_MAX ? -1 : (int)number;
}

/* Return bytes for so many parts of the same size, and some more. */
static PyObject *
new_bytes(size_t count, size_t size, size_t more)
{
    if (count > (PY_SSIZE_T_MAX - more) / size)
        return PyErr_NoMemory();
    return PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * size + more));
}

/*
 * Read the arguments of a function: a buffer, and integers behind it, of which the first ``needed``
 * must be there. The formats of PyArg_ParseTuple would take longer than to decode some numbers.
 * Return false with an error set, and no buffer, if they are others.
 */
static bool
read_arguments(
    PyObject *const *arguments, Py_ssize_t given, Py_buffer *buffer, Py_ssize_t *numbers,
    Py_ssize_t needed, Py_ssize_t most)
{
    if (given <= needed || given > 1 + most) {
        PyErr_SetString(PyExc_TypeError, "these are too few arguments, or too many");
        return false;
    }
    for (Py_ssize_t index = 1; index < given; index++) {
        numbers[index - 1] = PyLong_AsSsize_t(arguments[index]);
        if (numbers[index - 1] == -1 && PyErr_Occurred())
            return false;
    }
    return PyObject_GetBuffer(arguments[0], buffer, PyBUF_SIMPLE) == 0;
}

PyObject *
new_elements(const Py_buffer *text, int datatype)
{
    if (!is_datatype(datatype))
        return NULL;
    return new_bytes(most_elements((size_t)text->len), ELEMENT_SIZES[datatype], 0);
}

bool
are_elements(const Py_buffer *data, int datatype, int nonfinite)
{
    if (!is_datatype(datatype))
        return false;
    if (nonfinite < NONFINITE_ERROR || nonfinite > NONFINITE_STRING)
        PyErr_Format(PyExc_ValueError, "there is no way %d to write a NaN", nonfinite);
    else if (data->len % ELEMENT_SIZES[datatype] != 0)
        PyErr_SetString(PyExc_ValueError, "the data end inside an element");
    else
        return true;
    return false;
}

PyObject *
new_text(const Py_buffer *data, int datatype, size_t more)
{
    size_t count = (size_t)data->len / ELEMENT_SIZES[datatype];
    return new_bytes(count, most_text((enum datatype)datatype), 1 + more + ENCODE_SLACK);
}

PyDoc_STRVAR(decode_numbers_doc,
"decode_numbers(text, datatype, open_before=0, open_after=0, null_is_nan=False, /)\n"
"-> bytes | None\n\n"
"Return the elements of a JSON array of numbers, nested or flat, in their binary form.\n\n"
"The text may lack open_before opening and open_after closing brackets. Bare NaN, Infinity\n"
"and -Infinity count as numbers of floats; null is NaN among them if null_is_nan is true.\n"
"Returns None if the text is no such array, or if any number does not fit.\n"
"Raises ValueError for a datatype that is not the number of one in DATATYPES.");

static PyObject *
decode_numbers_in_python(
    PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given)
{
    Py_buffer text;
    enum { DATATYPE, OPEN_BEFORE, OPEN_AFTER, NULL_IS_NAN, NUMBERS };
    Py_ssize_t numbers[NUMBERS] = {0};
    if (!read_arguments(arguments, given, &text, numbers, 1, NUMBERS))
        return NULL;
    int datatype = as_int(numbers[DATATYPE]);
    PyObject *elements = new_elements(&text, datatype);
    if (elements != NULL) {
        char *to = PyBytes_AS_STRING(elements);
        Py_ssize_t count;
        RUN_UNLOCKED(
            text.len,
            count = decode_numbers(
                text.buf, (size_t)text.len, (enum datatype)datatype,
                as_int(numbers[OPEN_BEFORE]), as_int(numbers[OPEN_AFTER]),
                numbers[NULL_IS_NAN] != 0, to));
        elements = resized_or_none(elements, count * ELEMENT_SIZES[datatype]);
    }
    PyBuffer_Release(&text);
    return elements;
}

enum { MAX_RANK = 64 };

/*
 * Read the shape of ``count`` elements: the sizes of its arrays, but for the outermost, from the
 * innermost outwards. Return how many these are; -1 with ValueError if it is not their shape.
 */
static int
read_shape(PyObject *shape, size_t count, size_t *sizes)
{
    Py_ssize_t rank = shape == NULL ? 0 : PyTuple_GET_SIZE(shape);
    size_t size = 1;
    if (rank == 0)
        return 0;
    for (Py_ssize_t level = 0; level < rank && rank <= MAX_RANK; level++) {
        size_t length = PyLong_AsSize_t(PyTuple_GET_ITEM(shape, rank - 1 - level));
        if (length == (size_t)-1 && PyErr_Occurred())
            return -1;
        if (length == 0 || size > count / length)
            break;
        size *= length;
        if (level == rank - 1 && size == count)
            return (int)rank - 1;
        sizes[level] = size;
    }
    PyErr_SetString(PyExc_ValueError, "this is not the shape of the elements");
    return -1;
}

PyDoc_STRVAR(encode_numbers_doc,
"encode_numbers(data, datatype, nonfinite=0, continued=False, shape=(), /) -> bytes | None\n\n"
"Return the text of binary elements as JSON, with commas between them but no brackets; with a\n"
"comma in front of the first if they are continued.\n\n"
"NaN and infinities become null if nonfinite is 1, NaN, Infinity and -Infinity if it is 2, and\n"
"these in quotes if it is 3. A shape makes nested arrays; the outermost has no brackets.\n"
"Returns None if it is 0 and there are any, or for a BOOL other than 0 and 1.\n"
"Raises ValueError if the data end inside an element, if there are not as many as the shape\n"
"takes, or none, and for an unknown datatype or nonfinite.");

static PyObject *
encode_numbers_in_python(
    PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given)
{
    Py_buffer data;
    enum { DATATYPE, NONFINITE, CONTINUED, NUMBERS };
    Py_ssize_t numbers[NUMBERS] = {0};
    PyObject *shape = given == NUMBERS + 2 ? arguments[NUMBERS + 1] : NULL, *text = NULL;
    if (shape != NULL && !PyTuple_Check(shape))
        return PyErr_Format(PyExc_TypeError, "a shape is a tuple");
    if (!read_arguments(arguments, given - (shape != NULL), &data, numbers, 1, NUMBERS))
        return NULL;
    const int datatype = as_int(numbers[DATATYPE]), nonfinite = as_int(numbers[NONFINITE]);
    const bool continued = numbers[CONTINUED] != 0;
    int levels = -1;
    size_t count = 0, sizes[MAX_RANK];
    if (are_elements(&data, datatype, nonfinite)) {
        count = (size_t)data.len / ELEMENT_SIZES[datatype];
        levels = read_shape(shape, count, sizes);
    }
    if (levels >= 0)
        text = new_text(&data, datatype, nested_text(count, sizes, levels));
    if (text != NULL) {
        char *to = after_comma(PyBytes_AS_STRING(text), continued);
        Py_ssize_t size;
        RUN_UNLOCKED(
            data.len,
            size = encode_nested(
                data.buf, count, (enum datatype)datatype, (enum nonfinite)nonfinite, sizes, levels,
                to));
        text = resized_or_none(text, size < 0 ? size : size + continued);
    }
    PyBuffer_Release(&data);
    return text;
}

PyDoc_STRVAR(scan_numbers_doc,
"scan_numbers(buffer, start, end, /) -> tuple[int, int, int, int, int, int, int]\n\n"
"Scan the text of a buffer from start to end, which begins among the numbers of an array.\n\n"
"Returns, counted from start: where it stops being numbers and brackets for certain, or its\n"
"size; the end of the last closing bracket before that, 0 without one, and how many brackets\n"
"were opened and closed up to there; the last comma before that, -1 without one, and the same.\n"
"Raises ValueError for an end outside of the buffer.");

static PyObject *
scan_numbers_in_python(
    PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given)
{
    Py_buffer buffer;
    Py_ssize_t range[2];
    if (!read_arguments(arguments, given, &buffer, range, 2, 2))
        return NULL;
    const Py_ssize_t start = range[0], end = range[1];
    if (start < 0 || end < start || end > buffer.len) {
        PyBuffer_Release(&buffer);
        return PyErr_Format(PyExc_ValueError, "%zd to %zd is outside of the buffer", start, end);
    }
    struct number_scan scan = scan_numbers((char *)buffer.buf + start, (size_t)(end - start));
    PyBuffer_Release(&buffer);
    const Py_ssize_t found[] = {
        scan.stop, scan.close, scan.before_close.opened, scan.before_close.closed,
        scan.cut, scan.before_cut.opened, scan.before_cut.closed};
    enum { FOUND = sizeof found / sizeof *found };
    PyObject *result = PyTuple_New(FOUND);
    for (int index = 0; result != NULL && index < FOUND; index++) {
        PyObject *number = PyLong_FromSsize_t(found[index]);
        if (number == NULL)
            Py_CLEAR(result);
        else
            PyTuple_SET_ITEM(result, index, number);
    }
    return result;
}

PyMethodDef number_functions[] = {
    {"decode_numbers", (PyCFunction)(void (*)(void))decode_numbers_in_python, METH_FASTCALL,
     decode_numbers_doc},
    {"encode_numbers", (PyCFunction)(void (*)(void))encode_numbers_in_python, METH_FASTCALL,
     encode_numbers_doc},
    {"scan_numbers", (PyCFunction)(void (*)(void))scan_numbers_in_python, METH_FASTCALL,
     scan_numbers_doc},
    {NULL, NULL, 0, NULL},
};
