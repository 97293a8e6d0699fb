"""A TLS client that sends what Python's ssl has no function for: KeyUpdate messages."""

from __future__ import annotations

import _ssl
import ctypes
import socket

_KEY_UPDATE_NOT_REQUESTED = 0
_KEY_UPDATE_REQUESTED = 1


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(_ssl.__file__)
    pointer, size = ctypes.c_void_p, ctypes.c_int
    for name, result, arguments in (
        ("TLS_client_method", pointer, ()),
        ("SSL_CTX_new", pointer, (pointer,)),
        ("SSL_CTX_free", None, (pointer,)),
        ("SSL_new", pointer, (pointer,)),
        ("SSL_free", None, (pointer,)),
        ("SSL_set_connect_state", None, (pointer,)),
        ("SSL_set_bio", None, (pointer, pointer, pointer)),
        ("SSL_do_handshake", size, (pointer,)),
        ("SSL_key_update", size, (pointer, size)),
        ("SSL_write", size, (pointer, ctypes.c_char_p, size)),
        ("BIO_s_mem", pointer, ()),
        ("BIO_new", pointer, (pointer,)),
        ("BIO_read", size, (pointer, ctypes.c_char_p, size)),
        ("BIO_write", size, (pointer, ctypes.c_char_p, size)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class OpensslClient:
    """A connection of TLS 1.3 over a blocking socket, which verifies nothing."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._library = library = _load()
        self._context = library.SSL_CTX_new(library.TLS_client_method())
        self._tls = library.SSL_new(self._context)
        self._incoming, self._outgoing = (library.BIO_new(library.BIO_s_mem()) for _ in range(2))
        library.SSL_set_bio(self._tls, self._incoming, self._outgoing)
        library.SSL_set_connect_state(self._tls)

    def close(self) -> None:
        """Free what it holds; the socket stays open."""
        self._library.SSL_free(self._tls)
        self._library.SSL_CTX_free(self._context)

    def do_handshake(self) -> None:
        """Send and receive the handshake."""
        while self._library.SSL_do_handshake(self._tls) != 1:
            self._sock.sendall(self._encrypted())
            received = self._sock.recv(65536)
            assert received
            self._library.BIO_write(self._incoming, received, len(received))
        self._sock.sendall(self._encrypted())

    def key_updates(self, count: int, requested: bool) -> bytes:
        """Return KeyUpdate messages, which may request one in return (RFC 8446, section 4.6.3)."""
        kind = _KEY_UPDATE_REQUESTED if requested else _KEY_UPDATE_NOT_REQUESTED
        for _ in range(count):
            assert self._library.SSL_key_update(self._tls, kind) == 1
            assert self._library.SSL_do_handshake(self._tls) == 1
        return self._encrypted()

    def encrypt(self, data: bytes) -> bytes:
        """Return data as it is sent."""
        assert self._library.SSL_write(self._tls, data, len(data)) == len(data)
        return self._encrypted()

    def _encrypted(self) -> bytes:
        pieces, space = [], ctypes.create_string_buffer(65536)
        while (size := self._library.BIO_read(self._outgoing, space, len(space))) > 0:
            pieces.append(space.raw[:size])
        return b"".join(pieces)
