/* The functions of the module for strings: see module.c. */
#include "python.h"

#include <string.h>

#include "base64.h"
#include "decode_strings.h"
#include "encode_strings.h"
#include "scan_strings.h"

PyDoc_STRVAR(decode_strings_doc,
"decode_strings(text, open_before=0, open_after=0, /) -> tuple[int, bytes] | None\n\n"
"Return the number of strings in a JSON array, nested or flat, and their binary form.\n\n"
"The text may lack open_before opening and open_after closing brackets.\n"
"Returns None if the text is no such array, or not UTF-8.");

PyDoc_STRVAR(decode_elements_doc,
"decode_elements(text, open_before=0, open_after=0, /)\n"
"    -> tuple[int, bytes, bytes, bool] | None\n\n"
"Decode strings as decode_strings does, and objects {\"b64\": \"...\"}.\n\n"
"Also returns the brackets and commas around them, and whether any is an object.");

/* Run either decoder; ``in_v1`` tells which. */
static PyObject *
decode_in_python(PyObject *arguments, int in_v1)
{
    Py_buffer text;
    int open_before = 0, open_after = 0;
    if (!PyArg_ParseTuple(arguments, "y*|ii", &text, &open_before, &open_after))
        return NULL;
    size_t size = (size_t)text.len;
    PyObject *elements = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)most_element_bytes(size));
    PyObject *marks = PyBytes_FromStringAndSize(NULL, in_v1 ? text.len : 0);
    Py_ssize_t count = -1;
    struct decoded_strings decoded = {0};
    if (elements != NULL && marks != NULL) {
        decoded.elements = PyBytes_AS_STRING(elements);
        decoded.marks = PyBytes_AS_STRING(marks);
        RUN_UNLOCKED(
            text.len,
            count = (in_v1 ? decode_elements : decode_strings)(
                text.buf, size, open_before, open_after, &decoded));
        if (count >= 0)
            _PyBytes_Resize(&elements, (Py_ssize_t)decoded.elements_size);
        if (count >= 0 && in_v1)
            _PyBytes_Resize(&marks, (Py_ssize_t)decoded.marks_size);
    }
    PyBuffer_Release(&text);
    PyObject *result = NULL;
    if (elements != NULL && marks != NULL) {
        if (count < 0)
            result = Py_NewRef(Py_None);
        else if (in_v1)
            result = Py_BuildValue(
                "nOOO", count, elements, marks, decoded.has_base64 ? Py_True : Py_False);
        else
            result = Py_BuildValue("nO", count, elements);
    }
    Py_XDECREF(elements);
    Py_XDECREF(marks);
    return result;
}

static PyObject *
decode_strings_in_python(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    return decode_in_python(arguments, 0);
}

static PyObject *
decode_elements_in_python(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    return decode_in_python(arguments, 1);
}

PyDoc_STRVAR(decode_text_doc,
"decode_text(text, /) -> bytes | None\n\n"
"Return the UTF-8 of what stands between the quotes of a JSON string, or of a part of it.\n\n"
"Returns None if the text is invalid.");

static PyObject *
decode_text_in_python(PyObject *Py_UNUSED(module), PyObject *argument)
{
    Py_buffer text;
    if (PyObject_GetBuffer(argument, &text, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *decoded = PyBytes_FromStringAndSize(NULL, text.len);
    if (decoded != NULL) {
        char *to = PyBytes_AS_STRING(decoded);
        Py_ssize_t size;
        RUN_UNLOCKED(text.len, size = decode_text(text.buf, (size_t)text.len, to));
        decoded = resized_or_none(decoded, size);
    }
    PyBuffer_Release(&text);
    return decoded;
}

PyDoc_STRVAR(decode_base64_doc,
"decode_base64(text, canonical, /) -> bytes | None\n\n"
"Decode base64 with the standard alphabet.\n\n"
"Canonical text is padded, and has no unused bits that are set. Other text may lack all of its\n"
"padding. Returns None if the text is invalid.");

static PyObject *
decode_base64_in_python(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer text;
    int canonical;
    if (!PyArg_ParseTuple(arguments, "y*p", &text, &canonical))
        return NULL;
    size_t size = (size_t)text.len;
    PyObject *decoded = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)most_decoded(size));
    if (decoded != NULL) {
        char *to = PyBytes_AS_STRING(decoded), *end;
        RUN_UNLOCKED(text.len, end = decode_base64(text.buf, size, canonical, to));
        decoded = resized_or_none(decoded, end == NULL ? -1 : end - to);
    }
    PyBuffer_Release(&text);
    return decoded;
}

PyDoc_STRVAR(decode_base64_elements_doc,
"decode_base64_elements(data, /) -> tuple[int, int, bytes] | None\n\n"
"Decode BYTES elements whose bytes are canonical base64: RFC 4648, section 4, with padding.\n\n"
"An incomplete element at the end is left. Returns the number of the others, their size, and\n"
"the elements that they become; None if any is invalid.");

static PyObject *
decode_base64_elements_in_python(PyObject *Py_UNUSED(module), PyObject *argument)
{
    Py_buffer data;
    if (PyObject_GetBuffer(argument, &data, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *decoded = PyBytes_FromStringAndSize(NULL, data.len);
    Py_ssize_t count = -1;
    size_t used = 0, written = 0;
    if (decoded != NULL) {
        char *to = PyBytes_AS_STRING(decoded);
        RUN_UNLOCKED(
            data.len,
            count = decode_base64_elements(data.buf, (size_t)data.len, to, &used, &written));
        decoded = resized_or_none(decoded, count < 0 ? -1 : (Py_ssize_t)written);
    }
    PyBuffer_Release(&data);
    if (decoded == NULL || count < 0)
        return decoded;
    return Py_BuildValue("nnN", count, (Py_ssize_t)used, decoded);
}

/* Twice as much room as before, for a text that did not fit; NULL is an error. */
static PyObject *
twice_as_large(PyObject *bytes)
{
    Py_ssize_t size = PyBytes_GET_SIZE(bytes);
    Py_DECREF(bytes);
    if (size > PY_SSIZE_T_MAX / 2)
        return PyErr_NoMemory();
    return PyBytes_FromStringAndSize(NULL, 2 * size);
}

/* The room that is tried first: what hardly any text exceeds. */
static Py_ssize_t
first_room(Py_ssize_t size, enum string_form form)
{
    return size + (form == TEXT ? size / 16 : form == BASE64 ? size / 2 : size + size / 2) + 128;
}

PyDoc_STRVAR(encode_strings_doc,
"encode_strings(data, form, first_index=0, row_sizes=b'', /) -> tuple[int, int, bytes] | None\n\n"
"Encode BYTES elements as JSON strings, with the commas and brackets before each.\n\n"
"The form is 0 for text, 1 for base64, 2 for objects {\"b64\": \"...\"}. The first element is\n"
"number first_index of its tensor. row_sizes are uint64: how many elements the arrays of each\n"
"level hold, from the innermost on; without them, no brackets are written. An incomplete\n"
"element at the end is left. Returns the number of the others, their size, and the text; None\n"
"if one should be text, and is not UTF-8.\n"
"Raises ValueError for another form, and for other row sizes.");

/* Check what Python gave as a layout; sets ValueError. */
static int
is_layout(int form, const Py_buffer *row_sizes)
{
    const char *sizes = row_sizes->buf;
    int is_valid = form >= 0 && form < STRING_FORM_COUNT && row_sizes->len % 8 == 0;
    for (Py_ssize_t level = 0; is_valid && level < row_sizes->len / 8; level++) {
        uint64_t size;
        memcpy(&size, sizes + 8 * level, sizeof size);
        is_valid = size != 0;
    }
    if (!is_valid)
        PyErr_SetString(PyExc_ValueError, "there is no such form, or there are no such rows");
    return is_valid;
}

static PyObject *
encode_strings_in_python(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer data, row_sizes = {0};
    int form;
    unsigned long long first_index = 0;
    if (!PyArg_ParseTuple(arguments, "y*i|Ky*", &data, &form, &first_index, &row_sizes))
        return NULL;
    PyObject *text = NULL;
    Py_ssize_t size = NO_ROOM;
    size_t used = 0;
    uint64_t count = 0;
    if (is_layout(form, &row_sizes)) {
        const struct string_layout layout = {
            (enum string_form)form, first_index, row_sizes.buf, (size_t)row_sizes.len / 8};
        text = PyBytes_FromStringAndSize(NULL, first_room(data.len, layout.form));
        while (text != NULL) {
            char *to = PyBytes_AS_STRING(text);
            size_t room = (size_t)PyBytes_GET_SIZE(text);
            RUN_UNLOCKED(
                data.len,
                size = encode_strings(
                    data.buf, (size_t)data.len, &layout, to, room, &used, &count));
            if (size != NO_ROOM)
                break;
            text = twice_as_large(text);
        }
        if (text != NULL)
            text = resized_or_none(text, size);
    }
    PyBuffer_Release(&data);
    if (row_sizes.obj != NULL)
        PyBuffer_Release(&row_sizes);
    if (text == NULL || size < 0)
        return text;
    return Py_BuildValue("KnN", (unsigned long long)count, (Py_ssize_t)used, text);
}

PyDoc_STRVAR(encode_base64_doc,
"encode_base64(data, /) -> bytes\n\n"
"Encode bytes as base64 with padding: RFC 4648, section 4.");

static PyObject *
encode_base64_in_python(PyObject *Py_UNUSED(module), PyObject *argument)
{
    Py_buffer data;
    if (PyObject_GetBuffer(argument, &data, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *text = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)base64_size((size_t)data.len));
    if (text != NULL) {
        char *to = PyBytes_AS_STRING(text);
        RUN_UNLOCKED(data.len, encode_base64(data.buf, (size_t)data.len, to));
    }
    PyBuffer_Release(&data);
    return text;
}

PyDoc_STRVAR(encode_text_doc,
"encode_text(data, /) -> tuple[int, bytes] | None\n\n"
"Encode a part of a BYTES element as JSON text without quotes.\n\n"
"A character that is incomplete at the end is left. Returns the size of the others, and their\n"
"text; None if they are not UTF-8.");

static PyObject *
encode_text_in_python(PyObject *Py_UNUSED(module), PyObject *argument)
{
    Py_buffer data;
    if (PyObject_GetBuffer(argument, &data, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *text = PyBytes_FromStringAndSize(NULL, first_room(data.len, TEXT));
    Py_ssize_t size = NO_ROOM;
    size_t used = 0;
    while (text != NULL) {
        char *to = PyBytes_AS_STRING(text);
        size_t room = (size_t)PyBytes_GET_SIZE(text);
        RUN_UNLOCKED(
            data.len, size = encode_text(data.buf, (size_t)data.len, to, room, &used));
        if (size != NO_ROOM)
            break;
        text = twice_as_large(text);
    }
    if (text != NULL)
        text = resized_or_none(text, size);
    PyBuffer_Release(&data);
    if (text == NULL || size < 0)
        return text;
    return Py_BuildValue("nN", (Py_ssize_t)used, text);
}

PyDoc_STRVAR(scan_strings_doc,
"scan_strings(text, depth, /) -> tuple[int, int, int, int, int | None, bool]\n\n"
"Return what scan_strings of plain.py does for text of strings, brackets and commas.");

static PyObject *
scan_strings_in_python(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer text;
    Py_ssize_t depth;
    if (!PyArg_ParseTuple(arguments, "y*n", &text, &depth))
        return NULL;
    struct string_scan scan;
    RUN_UNLOCKED(text.len, scan_strings(text.buf, (size_t)text.len, depth, &scan));
    PyBuffer_Release(&text);
    PyObject *last = scan.last_string < 0 ? Py_NewRef(Py_None)
                                          : PyLong_FromSsize_t(scan.last_string);
    return Py_BuildValue(
        "nnnnNO", scan.position, scan.cut, scan.depth_at_cut, scan.max_depth, last,
        scan.ended ? Py_True : Py_False);
}

PyDoc_STRVAR(find_string_end_doc,
"find_string_end(text, /) -> int\n\n"
"Return the offset of the quote that ends the string within which the text begins; of an escape\n"
"that is incomplete or half of a pair of surrogates; or of the end.");

static PyObject *
find_string_end_in_python(PyObject *Py_UNUSED(module), PyObject *argument)
{
    Py_buffer text;
    if (PyObject_GetBuffer(argument, &text, PyBUF_SIMPLE) < 0)
        return NULL;
    size_t at;
    RUN_UNLOCKED(text.len, at = find_string_end(text.buf, (size_t)text.len));
    PyBuffer_Release(&text);
    return PyLong_FromSize_t(at);
}

PyDoc_STRVAR(scan_array_values_doc,
"scan_array_values(text, /) -> tuple[int, bool, int]\n\n"
"Return the offset of the last comma between values of an array, or of the array's end;\n"
"whether the array ends there; and how deep the arrays before nest.");

static PyObject *
scan_array_values_in_python(PyObject *Py_UNUSED(module), PyObject *argument)
{
    Py_buffer text;
    if (PyObject_GetBuffer(argument, &text, PyBUF_SIMPLE) < 0)
        return NULL;
    struct value_scan scan;
    RUN_UNLOCKED(text.len, scan_array_values(text.buf, (size_t)text.len, &scan));
    PyBuffer_Release(&text);
    return Py_BuildValue("nOn", scan.end, scan.is_array_end ? Py_True : Py_False, scan.max_depth);
}

PyDoc_STRVAR(collect_marks_doc,
"collect_marks(text, /) -> bytes\n\n"
"Return the brackets and commas of a text outside of its strings, which are complete.");

static PyObject *
collect_marks_in_python(PyObject *Py_UNUSED(module), PyObject *argument)
{
    Py_buffer text;
    if (PyObject_GetBuffer(argument, &text, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *marks = PyBytes_FromStringAndSize(NULL, text.len);
    if (marks != NULL) {
        char *to = PyBytes_AS_STRING(marks);
        size_t size;
        RUN_UNLOCKED(text.len, size = collect_marks(text.buf, (size_t)text.len, to));
        marks = resized_or_none(marks, (Py_ssize_t)size);
    }
    PyBuffer_Release(&text);
    return marks;
}

PyMethodDef string_functions[] = {
    {"decode_strings", decode_strings_in_python, METH_VARARGS, decode_strings_doc},
    {"decode_elements", decode_elements_in_python, METH_VARARGS, decode_elements_doc},
    {"decode_text", decode_text_in_python, METH_O, decode_text_doc},
    {"decode_base64", decode_base64_in_python, METH_VARARGS, decode_base64_doc},
    {"decode_base64_elements", decode_base64_elements_in_python, METH_O,
     decode_base64_elements_doc},
    {"encode_strings", encode_strings_in_python, METH_VARARGS, encode_strings_doc},
    {"encode_base64", encode_base64_in_python, METH_O, encode_base64_doc},
    {"encode_text", encode_text_in_python, METH_O, encode_text_doc},
    {"scan_strings", scan_strings_in_python, METH_VARARGS, scan_strings_doc},
    {"find_string_end", find_string_end_in_python, METH_O, find_string_end_doc},
    {"scan_array_values", scan_array_values_in_python, METH_O, scan_array_values_doc},
    {"collect_marks", collect_marks_in_python, METH_O, collect_marks_doc},
    {NULL, NULL, 0, NULL},
};
