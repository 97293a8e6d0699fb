/* The datatypes of the Open Inference Protocol whose elements have one size. */
#ifndef DATATYPES_H
#define DATATYPES_H

#include <stddef.h>

enum datatype {
    BOOL,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
    INT8,
    INT16,
    INT32,
    INT64,
    FP16,
    FP32,
    FP64,
    BF16,
    DATATYPE_COUNT,
};

/* Their names, and the bytes of an element, by datatype: module.c has both. */
extern const char *const DATATYPE_NAMES[DATATYPE_COUNT];
extern const unsigned char ELEMENT_SIZES[DATATYPE_COUNT];

#endif
