"""The identity of a run: a hash, or the value, of everything that affects its numbers."""

from typing import Any

from mini_trainer.data.stores.disk import hash_json
from mini_trainer.data.stores.tokenizers import fingerprint_chat_template, fingerprint_tokenizer
from mini_trainer.data.tokenized.order import name_rule
from mini_trainer.distributed.messages import hide_in
from mini_trainer.model.fingerprints import fingerprint_data, fingerprint_model
from mini_trainer.options import OptimizationOptions, list_identifying_options
from mini_trainer.run.identity import OF_METHOD, ORDER, ORIGIN, REFERENCE, TEACHER, name_in_identity, to_json
from mini_trainer.run.inputs import RunInputs


def identify_run(inputs: RunInputs, optimization: OptimizationOptions) -> dict[str, Any]:
    """Everything that affects a run's numbers: a checkpoint only fits a run with the same identity. Includes the number
    of steps only if the learning rate depends on it.
    """
    data, has_own_end = inputs.data, optimization.needs_end and optimization.schedule_steps is None
    values = inputs.values | {"batch_size": inputs.data_options.samples_per_step}
    digests = [
        fingerprint_data(
            source.path, source=sidecar and sidecar.get("source"), lengths=source.lengths, kept=source.kept
        )
        for source, sidecar in zip(data.sources, inputs.sidecars, strict=True)
    ]
    return {
        "data": digests[0] if len(digests) == 1 else hash_json(digests),
        "tokenizer": fingerprint_tokenizer(inputs.tokenizer),
        "chat template": fingerprint_chat_template(inputs.tokenizer),
        "model": fingerprint_model(inputs.model_dir),
        ORDER: name_rule([len(kept) for kept in data.kept_of]),
        "compute-dtype": str(inputs.compute_dtype).removeprefix("torch."),
        "number of steps": inputs.num_steps if has_own_end else None,
        REFERENCE: find_reference(inputs),
        TEACHER: find_teacher(inputs),
        OF_METHOD: inputs.method.list_data_hashes(),
        ORIGIN: None if inputs.origin is None else inputs.origin.digest,
        **{name_in_identity(name): to_json(hide_in(values[name])) for name in list_identifying_options()},
    }


def find_reference(inputs: RunInputs) -> str | None:
    """A hash of everything but the data that affects the reference's numbers; None without a reference."""
    if inputs.objective.reference is None:
        return None
    from mini_trainer.run.references import identify_reference

    return identify_reference(inputs)


def find_teacher(inputs: RunInputs) -> str | None:
    """A hash of the teacher's scores, or of its weights and what it reads; None if the objective has no teacher."""
    if inputs.objective.teacher is None:
        return None
    from mini_trainer.run.teachers import identify_teacher

    return identify_teacher(inputs)
