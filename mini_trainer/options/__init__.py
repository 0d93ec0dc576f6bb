"""The options of every program, in groups: one frozen dataclass per concern, each option declared once.

In: command lines and YAML files (options/command_line.py). Out: checked options, or one message for all problems
(options/problems/).

An option's name is both its flag and its YAML key; names are unique across groups. A function takes the group that it
needs. Imports nothing heavy, so that `--help` and mistyped flags respond at once. Those of the programs other than
train.py are in options/tools.py.
"""

from mini_trainer.options.data import (
    DEFAULT_BATCH_SIZE,
    TRAINING_DATA,
    DataOptions,
    RowOptions,
    ValidationOptions,
    list_validation_data,
)
from mini_trainer.options.fields import (
    Options,
    flag_name,
    flatten_options,
    group_options,
    iterate_fields,
    list_facts,
    list_types,
    parse_duration,
    parse_machine,
    parse_named_values,
    parse_rate,
    parse_shard,
    parse_steps,
    parse_subset,
    replace_options,
)
from mini_trainer.options.learning import (
    ClassificationOptions,
    KeepOptions,
    LoRAOptions,
    ModelOptions,
    OptimizationOptions,
    OSFTOptions,
    PreferenceOptions,
    TeacherOptions,
    VisionOptions,
)
from mini_trainer.options.running import (
    CallbackOptions,
    CheckpointOptions,
    ComputeOptions,
    EndOptions,
    ExportOptions,
    HubOptions,
    PlanOptions,
    ProfilingOptions,
    ShardingOptions,
    TrackingOptions,
)
from mini_trainer.options.training import (
    PRESETS,
    SELF,
    TrainOptions,
    fill_unset,
    list_data_sets,
    list_deciding_options,
    list_defaults,
    list_differing_options,
    list_identifying_options,
    list_preset_values,
    names_raw_data,
)
