/* Token ids out of a JSON text: see digits.pyi. Built with the compiled core (hatch_build.py). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

static const unsigned char *behind_space(const unsigned char *at, const unsigned char *end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    return at;
}

/* Pack the ids between two places of a text; how many bytes they take, or -1 where there is anything else. */
static Py_ssize_t pack(const unsigned char *at, const unsigned char *end, unsigned char *out)
{
    const unsigned char *first = out;
    for (;;) {
        at = behind_space(at, end);
        const unsigned char *begun = at;
        uint64_t id = 0;
        unsigned int digit;
        /* a digit more than an id has: that fits into 64 bits, and is too large or begins with a zero */
        while (at < end && at - begun < 11 && (digit = (unsigned int)*at - '0') < 10) {
            id = id * 10 + digit;
            at++;
        }
        if (at == begun || id > UINT32_MAX || (*begun == '0' && at - begun > 1))
            return -1;
        out[0] = (unsigned char)id;
        out[1] = (unsigned char)(id >> 8);
        out[2] = (unsigned char)(id >> 16);
        out[3] = (unsigned char)(id >> 24);
        out += 4;
        at = behind_space(at, end);
        if (at == end)
            return out - first;
        if (*at++ != ',')
            return -1;
    }
}

static PyObject *packed_digits(PyObject *module, PyObject *args)
{
    PyObject *text, *ids;
    Py_ssize_t begin, end;
    (void)module;
    if (!PyArg_ParseTuple(args, "Snn", &text, &begin, &end))
        return NULL;
    if (begin < 0 || end < begin || PyBytes_GET_SIZE(text) < end) {
        PyErr_SetString(PyExc_ValueError, "not within the text");
        return NULL;
    }
    /* an id is a digit at least, and each but the last has a comma behind it */
    ids = PyBytes_FromStringAndSize(NULL, (end - begin + 1) / 2 * 4);
    if (ids == NULL)
        return NULL;
    const unsigned char *from = (const unsigned char *)PyBytes_AS_STRING(text);
    Py_ssize_t size = pack(from + begin, from + end, (unsigned char *)PyBytes_AS_STRING(ids));
    if (size < 0) {
        Py_DECREF(ids);
        Py_RETURN_NONE;
    }
    _PyBytes_Resize(&ids, size);
    return ids;
}

static PyMethodDef functions[] = {{"packed_digits", packed_digits, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "kvbus.core.blocks.digits", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_digits(void)
{
    return PyModuleDef_Init(&definition);
}
