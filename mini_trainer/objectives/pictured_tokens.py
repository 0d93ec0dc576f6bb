"""Language modelling on texts with images."""

from dataclasses import dataclass

from mini_trainer.data.columns.base import VISION
from mini_trainer.objectives.families.family import Family
from mini_trainer.objectives.families.vision import VisionLanguageFamily
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.objectives.objective import ObjectiveSettings


@dataclass(frozen=True)
class VisionLanguage(CausalLM):
    """The next tokens of texts with images."""

    name = VISION

    @classmethod
    def make_family(cls, settings: ObjectiveSettings) -> Family:
        vision, text_family = settings.vision, super().make_family(settings)
        return VisionLanguageFamily(text_family, tuple(vision.freeze), max_patches=vision.max_image_tokens_per_gpu)
