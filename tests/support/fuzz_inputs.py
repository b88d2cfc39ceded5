"""Odd strings, numbers, JSON texts and requests, from which a fuzzer makes inputs."""

STRINGS = [
    "", " ", "\0", "\x7f", "\x1b[31m", "\r\nX-More: 1", "\u202etxt", "\ud800", "\udc00\ud800", "\ufeffbom",
    "💥" * 40, "é", "\u0301",
    "a" * 65, "a" * 129, "a" * 300, "a" * 5000, "..", "../../etc", "%2e%2e", "%00", "whitelist", "defaults",
    "general",
    "'; DROP TABLE agents;--", "${jndi:x}", "{0}", "%s%n", "null", "true", "0", "-1", "1e999", "NaN", "60/minute",
    "1/second burst 1", "0/minute", "999999999999999999999/second", "1/0s", "unlimited", "blocked",
    "1/minute sliding",
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 2, 100, 101, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 0.1, -0.0,
    1e-320, 1e308, 5e-324, 1.5, 1e15, -1e16, float("nan"), float("inf"), True, False,
]  # fmt: skip
RAW = [
    "NaN", "-Infinity", "1e999", "-", "01", "+1", "1.", ".5", "0x10", "9" * 5000, "1e-99999", "1" + "0" * 4000,
    "[" * 300 + "]" * 300, "[" * 20_000 + "]" * 20_000, '{"a":' * 2000 + "1" + "}" * 2000, "[" * 50, "}", "]]",
    ",", "",
    r'"\ud800"', r'"\udc00\ud800"', r'"\uD83D\uDE00"', r'"\u0000"', r'"\x41"', r'"\u12"', '"\x00"', '"\t"', '"',
    "'a'",
    '{"a":1,"a":2}', '{"type":"ping","type":"status"}', "/*c*/1", "1//c", "\ufeff1", "undefined", "True", "nul",
    '"' + "x" * 70_000 + '"',
]  # fmt: skip
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "PROPFIND", "M-SEARCH", "PURGE"]
HEADERS = [
    b"Accept: */*", b"Accept: text/html", b"Accept-Encoding: gzip, br;q=0.1", b"Content-Type: text/plain",
    b"Content-Type: application/json; charset=utf-16", b"Content-Type: \xff\xfe", b"Content-Encoding: gzip",
    b"Cookie: a=b",
    b"X-Forwarded-For: 1.2.3.4, not-an-address", b"X-Forwarded-Proto: ftp", b"Forwarded: for=x", b"Origin: null",
    b"Range: bytes=0-1",
    b"If-None-Match: *", b"X-Long: " + b"v" * 8000, b"X-Empty:", b"Expect: 100-continue", b"TE: trailers",
    b"Host: other",
    b"Accept-Language: \x80\x81", b"X-HTTP-Method-Override: DELETE",
]  # fmt: skip
ESCAPES = [
    "/", "//", "/.", "/..", "%2f", "%2F..%2F", "%00", "%0d%0a", "%2e", "%", "%zz", "%ff", "%ed%a0%80",
    "%f0%9f%92%a5", ";a=b",
    "?", "?x", "?limit=", "&", "+", "*", "|", "~", "=", "a" * 3000, "%41" * 500,
]  # fmt: skip
# The protocol's own rules are broken: the connection is over, whatever else it says.
ILL_HEADS = [
    b"\r\n\r\n", b"\0\0\0\0", b"GET\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"get / http/1.1\r\n\r\n",
    b"GET /api/health HTTP/1.1\r\nHost\r\n\r\n", b"GET /api/health HTTP/1.1\r\n: x\r\n\r\n",
    b"GET \xff\xfe HTTP/1.1\r\n\r\n",
    b"GET /api/health HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"GET /api/health HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    b"POST /v1/check HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /v1/check HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/check HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    b"POST /v1/check HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
    b"POST /v1/check HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    b"POST /v1/check HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", b"OPTIONS * HTTP/1.1\r\n\r\n",
    b"CONNECT hub:443 HTTP/1.1\r\nHost: hub\r\n\r\n", b"GET http://[::1/api HTTP/1.1\r\n\r\n",
    b"GET ? HTTP/1.1\r\n\r\n",
    b"GET # HTTP/1.1\r\n\r\n", b"GET /api/health HTTP/1.1\nHost: x\n\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\0",
    b"GET /api/health HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /api/health HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", b"GET /api/health HTTP/1.0\r\n\r\n",
    b"GET /ws HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    b"GET /api/health HTTP/1.1\r\nConnection: close\r\n\r\n",
]  # fmt: skip
