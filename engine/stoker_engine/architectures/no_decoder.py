"""Models that no engine of this kind serves, and why: they do not generate token by token from text alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stoker_engine.architectures.config_fields import Fields

#: How the names of such architectures end → what they are.
_ENDINGS: Final = {
    "ForMaskedLM": "an encoder that fills masks",
    "ForPreTraining": "a model without a head that generates",
    "ForSequenceClassification": "a classifier",
    "ForTokenClassification": "a classifier",
    "ForMultipleChoice": "a classifier",
    "ForQuestionAnswering": "a model that marks answers",
    "ForImageClassification": "a model of images",
    "ForSpeechSeq2Seq": "a model of speech",
    "ForCTC": "a model of speech",
    "EncoderModel": "an encoder",
    "Model": "a model without a head that generates",
}

#: What is wrong with a config.json that does not say which model it describes, and the remedy.
NO_ARCHITECTURES: Final = "config.json names no architectures"
NAME_ONE: Final = 'it must say, for example, ["LlamaForCausalLM"]'


def why_no_decoder(config: Mapping[str, Any]) -> str | None:
    """The reason why a parsed config.json is no autoregressive decoder of text; None: it may be one.

    Raises:
        ModelError: its ``architectures`` are no list of names.
    """
    if config.get("is_encoder_decoder"):
        return "it is an encoder-decoder, not an autoregressive decoder"
    if "AutoModelForCausalLM" in Fields(config, {}).object("auto_map"):
        return None  # its files' own classes are named freely (ChatGLMModel)
    for architecture in Fields(config, {}).items("architectures", str):
        if architecture.endswith("LMHeadModel"):
            continue
        for ending, what in _ENDINGS.items():
            if architecture.endswith(ending):
                return f"it is {what}, not an autoregressive decoder"
    return None
