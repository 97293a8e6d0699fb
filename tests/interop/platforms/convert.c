/*
 * Converts as the C module does, by the threads of its pool, where there is no Python.
 *
 * It reads requests until standard input ends, and writes a response for each, in their order: the
 * result, which is the size of what was written if it is not below 0, and that.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "decode_numbers.h"
#include "decode_strings.h"
#include "encode_numbers.h"
#include "encode_strings.h"
#include "thread_pool.h"

enum kind { DECODE_NUMBERS, ENCODE_NUMBERS, DECODE_ELEMENTS, ENCODE_STRINGS };

const unsigned char ELEMENT_SIZES[DATATYPE_COUNT] = {
    [BOOL] = 1,  [UINT8] = 1, [UINT16] = 2, [UINT32] = 4, [UINT64] = 8, [INT8] = 1, [INT16] = 2,
    [INT32] = 4, [INT64] = 8, [FP16] = 2,   [FP32] = 4,   [FP64] = 8,   [BF16] = 2,
};

struct conversion {
    struct task task; /* the first field: a pointer to it is one to the conversion */
    struct { uint32_t kind, option, size; } head; /* as it is read */
    ptrdiff_t result;
    char *data, *output;
};

/* Not a byte more than that: sanitizers find what is beyond. */
static void *
allocated(size_t size)
{
    void *memory = malloc(size ? size : 1);
    if (memory == NULL)
        abort();
    return memory;
}

static void
convert(struct task *task)
{
    struct conversion *self = (struct conversion *)task;
    const char *data = self->data;
    size_t size = self->head.size, used, room = 2 * size + 64;
    uint64_t count;
    if (self->head.kind == DECODE_NUMBERS) {
        enum datatype datatype = self->head.option;
        self->output = allocated(most_elements(size) * ELEMENT_SIZES[datatype]);
        self->result = decode_numbers(data, size, datatype, 0, 0, true, self->output);
        if (self->result > 0)
            self->result *= ELEMENT_SIZES[datatype];
    } else if (self->head.kind == ENCODE_NUMBERS) {
        enum datatype datatype = self->head.option;
        count = size / ELEMENT_SIZES[datatype];
        self->output = allocated(count * most_text(datatype) + ENCODE_SLACK);
        self->result = encode_numbers(data, count, datatype, NONFINITE_STRING, self->output);
    } else if (self->head.kind == DECODE_ELEMENTS) {
        self->output = allocated(most_element_bytes(size));
        char *marks = allocated(size);
        struct decoded_strings to = {.elements = self->output, .marks = marks};
        self->result = decode_elements(data, size, 0, 0, &to);
        if (self->result >= 0)
            self->result = (ptrdiff_t)to.elements_size;
        free(marks);
    } else {
        struct string_layout layout = {.form = self->head.option};
        self->output = allocated(room);
        self->result = encode_strings(data, size, &layout, self->output, room, &used, &count);
    }
}

static struct conversion *
next_conversion(void)
{
    struct conversion *self = allocated(sizeof *self);
    *self = (struct conversion){.task.run = convert};
    if (fread(&self->head, sizeof self->head, 1, stdin) != 1) {
        free(self);
        return NULL;
    }
    self->data = allocated(self->head.size);
    if (fread(self->data, 1, self->head.size, stdin) != self->head.size)
        abort();
    return self;
}

/* LeakSanitizer does not work in an emulator. */
const char *
__asan_default_options(void)
{
    return "detect_leaks=0";
}

int
main(void)
{
    enum { MOST = 10000 };
    static struct conversion *all[MOST];
    int count = 0, notified[2];
    if (pipe(notified) != 0)
        return 1;
    struct thread_pool *pool = pool_new(3, notified[1]);
    if (pool == NULL)
        return 1;
    while (count < MOST && (all[count] = next_conversion()) != NULL)
        pool_submit(pool, &all[count++]->task);
    struct task *newest = pool_take_newest(pool);
    if (newest != NULL)
        pool_run(pool, newest);
    for (int index = 0; index < count; index++) {
        struct conversion *each = all[index];
        if (pool_take(pool, &each->task))
            pool_run(pool, &each->task);
        pool_wait(pool, &each->task);
        fwrite(&each->result, sizeof each->result, 1, stdout);
        if (each->result > 0)
            fwrite(each->output, 1, (size_t)each->result, stdout);
        free(each->data);
        free(each->output);
        free(each);
    }
    pool_free(pool);
    return 0;
}
