"""Parts of a vision-language model: vision tower, projector and language model."""

from transformers import PreTrainedModel

from pretrained.text_tower import find_decoder

PROJECTORS = ("projector", "connector", "merger", "embed_vision", "aligner")  # words in projectors' names


def list_parts(model: PreTrainedModel) -> dict[str, list[str]]:
    """Names of a model's parameters by part: vision tower, projector and language model."""
    language = [find_decoder(model), model.get_input_embeddings(), model.get_output_embeddings()]
    inside = {id(param) for part in language if part is not None for param in part.parameters()}
    parts: dict[str, list[str]] = {"vision": [], "projector": [], "language": []}
    for name, param in model.named_parameters():
        is_projector = any(word in name for word in PROJECTORS)
        parts["language" if id(param) in inside else "projector" if is_projector else "vision"].append(name)
    return parts
