"""Formats as patterns, where they are asserted."""

from __future__ import annotations

_HEX = "[0-9a-fA-F]"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = f"{_HEX}{{1,4}}"
_LAST = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
# RFC 4291, section 2.2: one run of zero groups may be left out.
_IPV6 = "|".join(
    [
        f"(?:{_GROUP}:){{6}}{_LAST}",
        f"::(?:{_GROUP}:){{5}}{_LAST}",
        *(rf"(?:(?:{_GROUP}:){{0,{before}}}{_GROUP})?::(?:{_GROUP}:){{{4 - before}}}{_LAST}" for before in range(5)),
        rf"(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}",
        rf"(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::",
    ]
)
_LEAP = "(?:(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26]))|(?:(?:0[048]|[2468][048]|[13579][26])00))"
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DATE = (
    f"(?:(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8])))|(?:(?!0000){_LEAP}-02-29))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ENCODED = f"%{_HEX}{{2}}"
_PCHAR = rf"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|{_ENCODED})"
_PATH = rf"(?:/{_PCHAR}*)*"
_AUTHORITY = (
    rf"(?:(?:[a-zA-Z0-9._~!$&'()*+,;=:-]|{_ENCODED})*@)?"
    rf"(?:\[(?:{_IPV6})\]|(?:[a-zA-Z0-9._~!$&'()*+,;=-]|{_ENCODED})*)(?::[0-9]*)?"
)
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_URI = rf"[a-zA-Z][a-zA-Z0-9+.-]*:(?://{_AUTHORITY}{_PATH}|/(?:{_PCHAR}+{_PATH})?|{_PCHAR}+{_PATH}|){_TAIL}"
_NO_COLON = rf"(?:[a-zA-Z0-9._~!$&'()*+,;=@-]|{_ENCODED})"
_RELATIVE = rf"(?://{_AUTHORITY}{_PATH}|/(?:{_PCHAR}+{_PATH})?|{_NO_COLON}+{_PATH}|){_TAIL}"
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"

PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "duration": f"^P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)$",
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})*$",
    "hostname": rf"^(?![^]{{254}}){_LABEL}(?:\.{_LABEL})*$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^(?:{_IPV6})$",
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "uri": f"^{_URI}$",
    "uri-reference": f"^(?:{_URI}|{_RELATIVE})$",
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
}
"""RFC 3339 (dates, times; no leap seconds, as most readers refuse them), RFC 5321 (email, unquoted), RFC 1123 (host names),
RFC 4291 (IPv6), RFC 3986 (URIs), RFC 6901 (pointers)."""

KNOWN = frozenset(PATTERNS) | {"idn-email", "idn-hostname", "iri", "iri-reference", "uri-template", "regex"}
"""The formats of the drafts; any other name is an annotation."""
