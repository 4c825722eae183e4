"""As much of a browser as an operator needs: cookies, forms, tables. Nothing is known of the pages beforehand."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass, field
from html.parser import HTMLParser
from http.cookiejar import CookieJar
from urllib.parse import urlencode, urljoin

from example_project.stage.processes import StageError

SKIPPED = {"script", "style", "head", "svg", "template"}
TIMEOUT = 20


@dataclass
class Form:
    action: str = ""
    method: str = "get"
    fields: list[tuple[str, str]] = field(default_factory=list)  # as they would be sent
    names: set[str] = field(default_factory=set)  # those of unchecked boxes and of buttons too
    options: dict[str, list[str]] = field(default_factory=dict)  # what radios and selects offer

    def filled(self, answers: dict[str, str]) -> list[tuple[str, str]]:
        """What is sent when these fields are filled in.

        Raises:
            StageError: the form has no such field, or the field does not offer that.
        """
        for name, value in answers.items():
            if name not in self.names:
                raise StageError(f"the form has no field {name!r}; it has {sorted(self.names)}")
            if name in self.options and value not in self.options[name]:
                raise StageError(f"{name!r} does not offer {value!r}; it offers {self.options[name]}")
        kept = [(name, value) for name, value in self.fields if name not in answers]
        return kept + list(answers.items())


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.forms: list[Form] = []
        self.links: list[tuple[str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.text: list[str] = []
        self._form: Form | None = None
        self._skipping = 0
        self._cell: list[str] | None = None
        self._link: tuple[str, list[str]] | None = None
        self._area: tuple[str, list[str]] | None = None
        self._select: tuple[str, list[tuple[str, bool]]] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if tag in SKIPPED:
            self._skipping += 1
        elif tag == "form":
            self._form = Form(attributes.get("action", ""), attributes.get("method", "get").lower())
            self.forms.append(self._form)
        elif tag == "a":
            self._link = (attributes.get("href", ""), [])
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell = []
        elif self._form is not None:
            self._field(self._form, tag, attributes)

    def _field(self, form: Form, tag: str, attributes: dict[str, str]) -> None:
        name, value = attributes.get("name", ""), attributes.get("value", "")
        if tag == "option" and self._select is not None:
            self._select[1].append((value, "selected" in attributes))
        elif not name:
            return
        elif tag == "select":
            self._select = (name, [])
        elif tag == "textarea":
            self._area = (name, [])
        elif tag == "button" or (tag == "input" and attributes.get("type") in ("submit", "image", "button")):
            form.options.setdefault(name, []).append(value)
        elif tag == "input" and attributes.get("type") in ("radio", "checkbox"):
            form.options.setdefault(name, []).append(value or "on")
            if "checked" in attributes:
                form.fields.append((name, value or "on"))
        elif tag == "input":
            form.fields.append((name, value))
        else:
            return
        form.names.add(name)

    def handle_endtag(self, tag: str) -> None:
        if tag in SKIPPED:
            self._skipping -= 1
        elif tag == "form":
            self._form = None
        elif tag == "a" and self._link:
            self.links.append((self._link[0], _joined(self._link[1])))
            self._link = None
        elif tag in ("td", "th") and self._cell is not None and self.tables and self.tables[-1]:
            self.tables[-1][-1].append(_joined(self._cell))
            self._cell = None
        elif self._form is not None:
            self._end_of_field(self._form, tag)

    def _end_of_field(self, form: Form, tag: str) -> None:
        if tag == "textarea" and self._area:
            form.fields.append((self._area[0], "".join(self._area[1]).strip()))
            self._area = None
        elif tag == "select" and self._select:
            name, offered = self._select
            form.options[name] = [value for value, _ in offered]
            chosen = [value for value, selected in offered if selected] or form.options[name][:1]
            form.fields.extend((name, value) for value in chosen)
            self._select = None

    def handle_data(self, data: str) -> None:
        if self._skipping:
            return
        for collected in (self._cell, self._link and self._link[1], self._area and self._area[1], self.text):
            if collected is not None:
                collected.append(data)


def _joined(parts: list[str]) -> str:
    return " ".join(" ".join(parts).split())


class Page:
    """An answer of the site."""

    def __init__(self, url: str, status: int, html: str) -> None:
        self.url = url
        self.status = status
        parser = _Parser()
        parser.feed(html)
        self.forms = parser.forms
        self.links = parser.links
        self.tables = parser.tables
        self.text = _joined(parser.text)

    def form(self, *names: str) -> Form:
        """The form that has these fields.

        Raises:
            StageError: there is none.
        """
        for form in self.forms:
            if form.names.issuperset(names):
                return form
        raise StageError(f"{self.url} ({self.status}) has no form with {names}. It says: {self.text[:600]}")

    def link(self, *words: str) -> str:
        """The first link that has all of these in its text or address.

        Raises:
            StageError: there is none.
        """
        for address, text in self.links:
            if all(word in text or word in address for word in words):
                return urljoin(self.url, address)
        raise StageError(f"{self.url} ({self.status}) has no link with {words}. It says: {self.text[:600]}")

    def row(self, containing: str) -> dict[str, str]:
        """The table row that contains this, under its column heads.

        Raises:
            StageError: there is none.
        """
        for heads, *rows in filter(None, self.tables):
            for row in rows:
                if any(containing in cell for cell in row):
                    return dict(zip(heads, row, strict=False))
        raise StageError(
            f"{self.url} ({self.status}) has no row with {containing!r}. It says: {self.text[:600]}"
        )


class Browser:
    """One person's session with the site."""

    def __init__(self, site: str) -> None:
        self.site = site
        # Without proxies: what they are for is not on this machine.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(CookieJar())
        )

    def open(self, address: str, data: bytes | None = None) -> Page:
        url = urljoin(self.site, address)
        try:
            with self._opener.open(url, data, timeout=TIMEOUT) as answer:
                return Page(answer.url, answer.status, answer.read().decode())
        except urllib.error.HTTPError as refusal:
            with refusal:
                return Page(url, refusal.code, refusal.read().decode(errors="replace"))
        except OSError as exc:
            raise StageError(f"{url} does not answer: {exc}") from exc

    def submit(self, page: Page, form: Form, answers: dict[str, str]) -> Page:
        """Fill in a form of a page and send it."""
        sent = urlencode(form.filled(answers))
        target = urljoin(page.url, form.action or page.url)
        if form.method == "get":
            return self.open(f"{target.partition('?')[0]}?{sent}")
        return self.open(target, sent.encode())
