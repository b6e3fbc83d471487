"""Settings: environment, validation and immutability."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from models.attention.attend import EXACT_UP_TO, AttentionOptions
from models.text.encoders import StaticEncoder
from service.domain.errors import Invalid
from service.domain.settings import Settings, check_embedding_dim, unknown_variables


def test_every_setting_is_documented() -> None:
    undocumented = [n for n, field in Settings.model_fields.items() if not field.description]
    assert undocumented == []


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """HEED_* variables are parsed by type, and an empty variable is ignored."""
    monkeypatch.setenv("HEED_DEADLINE", "0.25")
    monkeypatch.setenv("HEED_INSECURE", "true")
    monkeypatch.setenv("HEED_PORT", "")
    settings = Settings.read()
    assert (settings.deadline, settings.insecure, settings.port) == (0.25, True, 8000)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HEED_PORT", "eighty"),
        ("HEED_PORT", "65536"),
        ("HEED_DEADLINE", "0"),
        ("HEED_DEADLINE", "nan"),
        ("HEED_MAX_IN_FLIGHT", "0"),
        ("HEED_LOG_LEVEL", "loud"),
        ("HEED_EMBEDDING_DIM", "-1"),
        ("HEED_PAGE_FIELDS", "image=picture"),
    ],
)
def test_a_wrong_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """An invalid variable is refused by name, with its value."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(Invalid, match=variable) as caught:
        Settings.read()
    assert value in caught.value.detail
    assert not {"Value error", "Input should"} & {
        *re.findall("[A-Z][a-z]+ [a-z]+", caught.value.detail)
    }


def test_a_wrong_option_is_named_as_it_was_given() -> None:
    """The value of a command's option is no variable."""
    with pytest.raises(Invalid, match=r"^--port: must be less .* 65535 \(it is 70000\)$"):
        Settings.read({"port": 70_000})


def test_exact_means_the_same_over_http_and_in_the_models() -> None:
    """The default of `max_exact_rows` equals the models' default of `exact_up_to`."""
    assert (
        Settings.model_fields["max_exact_rows"].default
        == EXACT_UP_TO
        == AttentionOptions().exact_up_to
    )


def test_vectors_are_as_long_as_the_text_encoders_by_default() -> None:
    """The default dimension is the text encoder's; another is refused with both numbers."""
    check_embedding_dim(Settings(), StaticEncoder.name, StaticEncoder.dimension)
    with pytest.raises(Invalid, match=r"HEED_EMBEDDING_DIM is 3, but must be 8: .* encoder tiny"):
        check_embedding_dim(Settings(embedding_dim=3), "tiny", 8)


def test_settings_are_frozen_and_closed() -> None:
    """Settings are immutable and refuse unknown fields."""
    with pytest.raises(ValidationError):
        Settings().port = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Settings(prot=1)  # type: ignore[call-arg]


def test_misspelt_variable_is_logged() -> None:
    """An unknown HEED_* variable is reported with the nearest setting."""
    sentences = unknown_variables({"HEED_PROT": "1", "HEED_PORT": "1", "PATH": "/bin"})
    assert sentences == ["HEED_PROT is not a setting; did you mean HEED_PORT?"]
    assert unknown_variables({"HEED_FOO": "1"}) == ["HEED_FOO is not a setting"]
