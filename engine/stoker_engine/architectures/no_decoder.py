"""Reasons why a model is not supported: it is not an autoregressive decoder of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stoker_engine.architectures.config_fields import Fields

#: Suffix of the architecture's name → kind of model, for messages.
_ENDINGS: Final = {
    "ForMaskedLM": "an encoder that fills masks",
    "ForPreTraining": "a model without a language-model head",
    "ForSequenceClassification": "a classifier",
    "ForTokenClassification": "a classifier",
    "ForMultipleChoice": "a classifier",
    "ForQuestionAnswering": "a question-answering model that extracts spans",
    "ForImageClassification": "an image model",
    "ForSpeechSeq2Seq": "a speech model",
    "ForCTC": "a speech model",
    "EncoderModel": "an encoder",
    "Model": "a model without a language-model head",
}

#: Error and remedy for a config.json without ``architectures``.
NO_ARCHITECTURES: Final = "config.json names no architectures"
NAME_ONE: Final = 'add the field, for example "architectures": ["LlamaForCausalLM"]'


def why_no_decoder(config: Mapping[str, Any]) -> str | None:
    """Return why a parsed config.json is not an autoregressive decoder of text, or None if it may be one.

    Raises:
        ModelError: ``architectures`` or ``auto_map`` has the wrong type.
    """
    if config.get("is_encoder_decoder"):
        return "it is an encoder-decoder, not an autoregressive decoder"
    if "AutoModelForCausalLM" in Fields(config, {}).object("auto_map"):
        return None  # custom classes may have any name (ChatGLMModel)
    for architecture in Fields(config, {}).items("architectures", str):
        if architecture.endswith("LMHeadModel"):
            continue
        for ending, what in _ENDINGS.items():
            if architecture.endswith(ending):
                return f"it is {what}, not an autoregressive decoder"
    return None
