"""The reference of the settings is made from their schema, and says something of each."""

from __future__ import annotations

import pytest

from docs.generate_settings import PAGE, Setting, anchor, page, sections
from tests.docs.markdown import anchors

SETTINGS = [setting for section in sections() for setting in section.settings]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.path)
def test_every_setting_has_a_description_a_type_and_a_default(setting: Setting) -> None:
    assert setting.description.endswith((".", "?", ")"))
    assert len(setting.description.split()) > 1
    assert setting.kind
    assert setting.default


def test_every_section_has_a_heading_that_can_be_linked_to() -> None:
    titles = [section.path for section in sections() if section.path]
    assert {anchor(title) for title in titles} <= anchors(PAGE)
    assert len({anchor(title) for title in titles}) == len(titles)
