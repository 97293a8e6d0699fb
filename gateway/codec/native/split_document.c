/* The functions of the module that split JSON documents from their data: see module.c. */
#include "python.h"

#include <stddef.h>
#include <string.h>

#include "scan_numbers.h"
#include "scan_strings.h"

enum { MOST_ARRAYS = 256 };

struct span {
    const char *start, *end;
};

/* An array, and the start of the key before it. */
struct array {
    const char *key;
    struct span text;
    bool is_nested;
};

static bool
is_space(char each)
{
    return each == ' ' || each == '\t' || each == '\r' || each == '\n';
}

static const char *
skip_space(const char *at, const char *end)
{
    while (at < end && is_space(*at))
        at++;
    return at;
}

/* Return what stands behind a string and a colon at the start of a text; NULL if others do. */
static const char *
after_key(const char *at, const char *end, const char *name, ptrdiff_t size)
{
    /* Most strings differ in their first character, which is found without a call. */
    if (end - at < size || at[1] != name[1] || memcmp(at, name, (size_t)size) != 0)
        return NULL;
    at = skip_space(at + size, end);
    return at < end && *at == ':' ? skip_space(at + 1, end) : NULL;
}

/* Return the next place of a key, and what stands behind it; NULL if there is none. */
static const char *
find_key(const char *at, const char *end, const char *name, ptrdiff_t size, const char **behind)
{
    for (; (at = memchr(at, '"', (size_t)(end - at))) != NULL; at++) {
        if ((*behind = after_key(at, end, name, size)) != NULL)
            return at;
    }
    return NULL;
}

/* Find where an array of numbers or strings ends; its end is NULL if that is not clear. */
static void
find_end(struct array *array, const char *end)
{
    const char *start = array->text.start, *first = start;
    while (first < end && *first == '[')
        first = skip_space(first + 1, end);
    if (first < end && *first == '"') {
        struct string_scan scan;
        scan_strings(start, (size_t)(end - start), 0, &scan);
        array->text.end = scan.ended ? start + scan.position : NULL;
        array->is_nested = scan.max_depth > 1;
    } else {
        struct number_scan scan = scan_numbers(start, (size_t)(end - start));
        array->text.end = scan.close > 0 ? start + scan.close : NULL;
        array->is_nested = scan.before_close.opened > 1;
    }
}

/* Find the arrays of data in a text; return their number, -1 if they are too many or not clear. */
static int
find_arrays(const char *at, const char *end, struct array *arrays)
{
    int count = 0;
    const char *behind;
    while ((at = find_key(at, end, "\"data\"", 6, &behind)) != NULL) {
        if (behind == end || *behind != '[') {
            at++;
            continue;
        }
        if (count == MOST_ARRAYS)
            return -1;
        struct array *array = &arrays[count++];
        array->key = at;
        array->text.start = behind;
        find_end(array, end);
        if (array->text.end == NULL)
            return -1;
        at = array->text.end;
    }
    return count;
}

enum { MOST_PLACEHOLDER = sizeof "\"data\":[255]" - 1 };

/* Write what stands for an array: see placeholder in gateway/codec/json/data_extractor.py. */
static char *
write_placeholder(char *to, int number)
{
    memcpy(to, "\"data\":[", 8);
    to += 8;
    if (number >= 100)
        *to++ = (char)('0' + number / 100);
    if (number >= 10)
        *to++ = (char)('0' + number / 10 % 10);
    *to++ = (char)('0' + number % 10);
    *to++ = ']';
    return to;
}

/* Return a text with placeholders for its arrays; None if it would have more than most bytes. */
static PyObject *
replace_arrays(
    const char *at, const char *end, const struct array *arrays, int count, Py_ssize_t most)
{
    Py_ssize_t size = end - at;
    for (int index = 0; index < count; index++)
        size += MOST_PLACEHOLDER - (arrays[index].text.end - arrays[index].key);
    if (size - count * (Py_ssize_t)MOST_PLACEHOLDER > most)
        return Py_NewRef(Py_None);
    PyObject *result = PyBytes_FromStringAndSize(NULL, size);
    if (result == NULL)
        return NULL;
    char *start = PyBytes_AS_STRING(result), *to = start;
    for (int index = 0; index < count; index++) {
        ptrdiff_t before = arrays[index].key - at;
        memcpy(to, at, (size_t)before);
        to = write_placeholder(to + before, index);
        at = arrays[index].text.end;
    }
    memcpy(to, at, (size_t)(end - at));
    to += end - at;
    size = to - start;
    if (size > most || memchr(start, '\\', (size_t)size) != NULL)
        Py_SETREF(result, Py_NewRef(Py_None));
    else if (count > 0)
        _PyBytes_Resize(&result, size);
    return result;
}

/* Tell whether a plain string stands at the start of a text; return what is in it. */
static bool
read_plain_string(const char *at, const char *end, struct span *inside)
{
    if (at == end || *at != '"')
        return false;
    inside->start = ++at;
    while (at < end && *at >= ' ' && *at <= '~' && *at != '"' && *at != '\\')
        at++;
    inside->end = at;
    return at < end && *at == '"';
}

/* Find the id of a text: a plain string, and the only one with that key. */
static bool
find_id(const char *at, const char *end, struct span *id)
{
    const char *behind;
    return find_key(at, end, "\"id\"", 4, &behind) != NULL && read_plain_string(behind, end, id)
           && find_key(id->end, end, "\"id\"", 4, &behind) == NULL;
}

/* Take the id out of a text; return it with its place. The text is NULL if that fails. */
static PyObject *
take_id(PyObject **text, Py_ssize_t *place)
{
    char *start = PyBytes_AS_STRING(*text), *end = start + PyBytes_GET_SIZE(*text);
    struct span found;
    *place = 0;
    if (!find_id(start, end, &found))
        return Py_NewRef(Py_None);
    *place = found.start - start;
    const Py_ssize_t size = found.end - found.start;
    PyObject *id = PyUnicode_DecodeASCII(found.start, size, NULL);
    if (id == NULL || size == 0)
        return id;
    memmove(start + *place, found.end, (size_t)(end - found.end));
    if (_PyBytes_Resize(text, end - start - size) < 0)
        Py_CLEAR(id);
    return id;
}

static PyObject *
list_arrays(const struct array *arrays, int count)
{
    PyObject *list = PyList_New(count);
    for (int index = 0; list != NULL && index < count; index++) {
        const struct span *span = &arrays[index].text;
        PyObject *text = PyBytes_FromStringAndSize(span->start, span->end - span->start);
        PyObject *is_nested = arrays[index].is_nested ? Py_True : Py_False;
        PyObject *item = text == NULL ? NULL : PyTuple_Pack(2, text, is_nested);
        Py_XDECREF(text);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, index, item);
    }
    return list;
}

PyDoc_STRVAR(split_document_doc,
"split_document(text, most, /)\n"
"-> tuple[bytes, str | None, int, list[tuple[bytes, bool]]] | None\n\n"
"Return a JSON text with placeholders for its arrays of data and an empty id, and what they\n"
"replace: the id, None if it stays in the text, and its place; each array, and whether it is\n"
"nested.\n\n"
"None if more than most bytes would be left, or any escape; if there are too many arrays, or if\n"
"it is not clear where one ends.");

static PyObject *
split(const char *text, const char *end, Py_ssize_t most)
{
    struct array arrays[MOST_ARRAYS];
    const int count = find_arrays(text, end, arrays);
    if (count < 0)
        return Py_NewRef(Py_None);
    PyObject *common = replace_arrays(text, end, arrays, count, most);
    if (common == NULL || common == Py_None)
        return common;
    Py_ssize_t at;
    PyObject *id = take_id(&common, &at), *list = list_arrays(arrays, count);
    PyObject *place = PyLong_FromSsize_t(at), *result = NULL;
    if (common != NULL && id != NULL && list != NULL && place != NULL)
        result = PyTuple_Pack(4, common, id, place, list);
    Py_XDECREF(common);
    Py_XDECREF(id);
    Py_XDECREF(list);
    Py_XDECREF(place);
    return result;
}

static PyObject *
split_document(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given)
{
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "split_document takes two arguments");
        return NULL;
    }
    const Py_ssize_t most = PyLong_AsSsize_t(arguments[1]);
    if (most == -1 && PyErr_Occurred())
        return NULL;
    Py_buffer text;
    if (PyObject_GetBuffer(arguments[0], &text, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *result = split(text.buf, (const char *)text.buf + text.len, most);
    PyBuffer_Release(&text);
    return result;
}

/* Return where a text ends without this character and the white space around it; NULL without it. */
static const char *
before_last(const char *at, const char *end, char last)
{
    while (end > at && is_space(end[-1]))
        end--;
    return end > at && end[-1] == last ? end - 1 : NULL;
}

/* Find the array behind the key at the start of a document; false if the document has others. */
static bool
find_prediction(const char *at, const char *end, struct array *array, bool *is_rows)
{
    at = skip_space(at, end);
    if (at == end || *at != '{')
        return false;
    at = skip_space(at + 1, end);
    array->text.start = after_key(at, end, "\"instances\"", 11);
    *is_rows = array->text.start != NULL;
    if (!*is_rows && (array->text.start = after_key(at, end, "\"inputs\"", 8)) == NULL)
        return false;
    const char *close = before_last(array->text.start, end, '}');
    close = close == NULL ? NULL : before_last(array->text.start, close, ']');
    if (close == NULL || *array->text.start != '[')
        return false;
    array->text.end = close + 1;
    array->is_nested = memchr(array->text.start + 1, '[', (size_t)(close - array->text.start));
    return true;
}

PyDoc_STRVAR(split_prediction_doc,
"split_prediction(text, /) -> tuple[bool, bytes, bool] | None\n\n"
"Return whether the only key of a V1 request is instances, else it is inputs; its array; and\n"
"whether that is nested. None for any other text. What is within the array is not checked.");

static PyObject *
split_prediction(PyObject *Py_UNUSED(module), PyObject *text)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(text, &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    struct array found;
    bool is_rows;
    PyObject *result = NULL;
    if (find_prediction(buffer.buf, (const char *)buffer.buf + buffer.len, &found, &is_rows)) {
        const struct span *span = &found.text;
        PyObject *array = PyBytes_FromStringAndSize(span->start, span->end - span->start);
        if (array != NULL)
            result = PyTuple_Pack(
                3, is_rows ? Py_True : Py_False, array, found.is_nested ? Py_True : Py_False);
        Py_XDECREF(array);
    } else {
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&buffer);
    return result;
}

PyMethodDef document_functions[] = {
    {"split_prediction", split_prediction, METH_O, split_prediction_doc},
    {"split_document", (PyCFunction)(void (*)(void))split_document, METH_FASTCALL,
     split_document_doc},
    {NULL, NULL, 0, NULL},
};
