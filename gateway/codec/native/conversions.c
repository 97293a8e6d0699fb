/* The types ThreadPool and Conversion: conversions by threads that never need Python's lock. */
#include "python.h"

#include "decode_numbers.h"
#include "encode_numbers.h"
#include "thread_pool.h"

struct thread_pool_object {
    PyObject_HEAD
    struct thread_pool *pool;
};

/* What is converted into what, and how. */
struct conversion_kind {
    void (*run)(struct task *);
    int open_before, open_after, null_is_nan;
    enum nonfinite nonfinite;
    int continued;
};

struct conversion {
    PyObject_HEAD
    struct task task;
    struct thread_pool_object *owner;
    Py_buffer input;
    PyObject *output; /* bytes, with room for the longest result */
    Py_ssize_t result_size;
    enum datatype datatype;
    struct conversion_kind kind;
};

static PyTypeObject conversion_type;

/* ---- Conversion ---- */

static void
run_decoding(struct task *task)
{
    struct conversion *self = (struct conversion *)((char *)task - offsetof(struct conversion, task));
    ptrdiff_t count = decode_numbers(
        self->input.buf, (size_t)self->input.len, self->datatype, self->kind.open_before,
        self->kind.open_after, self->kind.null_is_nan, PyBytes_AS_STRING(self->output));
    self->result_size = count * ELEMENT_SIZES[self->datatype];
}

static void
run_encoding(struct task *task)
{
    struct conversion *self = (struct conversion *)((char *)task - offsetof(struct conversion, task));
    size_t count = (size_t)self->input.len / ELEMENT_SIZES[self->datatype];
    char *to = after_comma(PyBytes_AS_STRING(self->output), self->kind.continued);
    ptrdiff_t size =
        encode_numbers(self->input.buf, count, self->datatype, self->kind.nonfinite, to);
    self->result_size = size < 0 ? size : size + self->kind.continued;
}

static void
conversion_dealloc(PyObject *object)
{
    struct conversion *self = (struct conversion *)object;
    /* A thread that has begun is done in less than a millisecond, and does not need the lock. */
    if (!pool_take(self->owner->pool, &self->task))
        pool_wait(self->owner->pool, &self->task);
    PyBuffer_Release(&self->input);
    Py_XDECREF(self->output);
    Py_XDECREF(self->owner);
    Py_TYPE(object)->tp_free(object);
}

PyDoc_STRVAR(notify_doc,
"notify() -> bool\n\n"
"Have a byte written to the pool's descriptor when it is done; return False if it is done.");

static PyObject *
conversion_notify(PyObject *object, PyObject *Py_UNUSED(arguments))
{
    struct conversion *self = (struct conversion *)object;
    return PyBool_FromLong(pool_notify(self->owner->pool, &self->task));
}

PyDoc_STRVAR(take_result_doc,
"take_result() -> bytes | None\n\n"
"Return the converted data, once; None if it could not be converted.\n"
"Raises RuntimeError unless it is done.");

static PyObject *
conversion_take_result(PyObject *object, PyObject *Py_UNUSED(arguments))
{
    struct conversion *self = (struct conversion *)object;
    if (self->output == NULL || !pool_is_done(self->owner->pool, &self->task)) {
        PyErr_SetString(PyExc_RuntimeError, "the conversion is not done, or its result was taken");
        return NULL;
    }
    PyObject *output = self->output;
    self->output = NULL;
    PyBuffer_Release(&self->input);
    return resized_or_none(output, self->result_size);
}

static PyObject *
conversion_done(PyObject *object, void *Py_UNUSED(closure))
{
    struct conversion *self = (struct conversion *)object;
    return PyBool_FromLong(pool_is_done(self->owner->pool, &self->task));
}

static PyMethodDef conversion_methods[] = {
    {"notify", conversion_notify, METH_NOARGS, notify_doc},
    {"take_result", conversion_take_result, METH_NOARGS, take_result_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef conversion_attributes[] = {
    {"done", conversion_done, NULL, "Whether it is done.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject conversion_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gateway.codec.native._native.Conversion",
    .tp_doc = "A conversion that waits for a thread, is in progress, or is done.",
    .tp_basicsize = sizeof(struct conversion),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = conversion_dealloc,
    .tp_methods = conversion_methods,
    .tp_getset = conversion_attributes,
};

/* ---- ThreadPool ---- */

/* Make a conversion and submit it; takes the buffer and the output over. */
static PyObject *
submitted(
    struct thread_pool_object *pool, Py_buffer *input, PyObject *output, int datatype,
    struct conversion_kind kind)
{
    struct conversion *self = NULL;
    if (output != NULL)
        self = (struct conversion *)conversion_type.tp_alloc(&conversion_type, 0);
    if (self == NULL) {
        PyBuffer_Release(input);
        Py_XDECREF(output);
        return NULL;
    }
    self->owner = (struct thread_pool_object *)Py_NewRef((PyObject *)pool);
    self->input = *input;
    self->output = output;
    self->datatype = (enum datatype)datatype;
    self->kind = kind;
    self->task.run = kind.run;
    pool_submit(pool->pool, &self->task);
    return (PyObject *)self;
}

PyDoc_STRVAR(pool_decode_doc,
"decode_numbers(text, datatype, open_before=0, open_after=0, null_is_nan=False, /)\n"
"-> Conversion\n\n"
"Have a thread do what the function of this name does.");

static PyObject *
pool_decode_numbers(PyObject *object, PyObject *arguments)
{
    Py_buffer text;
    int datatype;
    struct conversion_kind kind = {.run = run_decoding};
    if (!PyArg_ParseTuple(
            arguments, "y*i|iip", &text, &datatype, &kind.open_before, &kind.open_after,
            &kind.null_is_nan))
        return NULL;
    PyObject *elements = new_elements(&text, datatype);
    return submitted((struct thread_pool_object *)object, &text, elements, datatype, kind);
}

PyDoc_STRVAR(pool_encode_doc,
"encode_numbers(data, datatype, nonfinite=0, continued=False, /) -> Conversion\n\n"
"Have a thread do what the function of this name does.");

static PyObject *
pool_encode_numbers(PyObject *object, PyObject *arguments)
{
    Py_buffer data;
    int datatype, nonfinite = NONFINITE_ERROR;
    struct conversion_kind kind = {.run = run_encoding};
    if (!PyArg_ParseTuple(
            arguments, "y*i|ip", &data, &datatype, &nonfinite, &kind.continued))
        return NULL;
    PyObject *text = NULL;
    if (are_elements(&data, datatype, nonfinite))
        text = new_text(&data, datatype, 0);
    kind.nonfinite = (enum nonfinite)nonfinite;
    return submitted((struct thread_pool_object *)object, &data, text, datatype, kind);
}

PyDoc_STRVAR(run_newest_doc,
"run_newest() -> bool\n\n"
"Do the newest conversion that no thread has begun in this one; return whether there was any.");

static PyObject *
pool_run_newest(PyObject *object, PyObject *Py_UNUSED(arguments))
{
    struct thread_pool *pool = ((struct thread_pool_object *)object)->pool;
    struct task *task = pool_take_newest(pool);
    if (task != NULL) {
        /* Whoever drops the conversion meanwhile waits for it with the lock. */
        Py_BEGIN_ALLOW_THREADS
        pool_run(pool, task);
        Py_END_ALLOW_THREADS
    }
    return PyBool_FromLong(task != NULL);
}

static PyObject *
pool_queued_count(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(pool_queued(((struct thread_pool_object *)object)->pool));
}

static PyObject *
pool_create(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"threads", "notified", NULL};
    int threads, notified;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "ii", names, &threads, &notified))
        return NULL;
    if (threads < 1) {
        PyErr_Format(PyExc_ValueError, "a pool of %d threads", threads);
        return NULL;
    }
    struct thread_pool_object *self = (struct thread_pool_object *)type->tp_alloc(type, 0);
    if (self != NULL && (self->pool = pool_new(threads, notified)) == NULL) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void
pool_dealloc(PyObject *object)
{
    struct thread_pool_object *self = (struct thread_pool_object *)object;
    if (self->pool != NULL) /* each conversion has a reference to the pool: none is left */
        pool_free(self->pool);
    Py_TYPE(object)->tp_free(object);
}

static PyMethodDef pool_methods[] = {
    {"decode_numbers", pool_decode_numbers, METH_VARARGS, pool_decode_doc},
    {"encode_numbers", pool_encode_numbers, METH_VARARGS, pool_encode_doc},
    {"run_newest", pool_run_newest, METH_NOARGS, run_newest_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef pool_attributes[] = {
    {"queued", pool_queued_count, NULL, "Conversions that no thread has begun.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(pool_doc,
"ThreadPool(threads, notified)\n\n"
"Threads that convert; they end when neither the pool nor a conversion of it is in use.\n\n"
"``notified`` is a descriptor that does not block. Raises OSError if no thread can be started.");

static PyTypeObject pool_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gateway.codec.native._native.ThreadPool",
    .tp_doc = pool_doc,
    .tp_basicsize = sizeof(struct thread_pool_object),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = pool_create,
    .tp_dealloc = pool_dealloc,
    .tp_methods = pool_methods,
    .tp_getset = pool_attributes,
};

int
add_thread_pool(PyObject *module)
{
    if (PyType_Ready(&conversion_type) < 0)
        return -1;
    return PyModule_AddType(module, &pool_type);
}
