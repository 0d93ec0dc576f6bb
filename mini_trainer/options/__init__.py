"""The options of every program, in groups: one frozen dataclass per concern, each option declared once.

In: command lines and YAML files (options/command_line.py). Out: checked options, or one message for all problems
(options/problems/).

An option's name is both its flag and its YAML key; names are unique across groups. A function takes the group that it
needs. Imports nothing heavy, so that `--help` and mistyped flags respond at once.
"""

from mini_trainer.options.data import (
    DEFAULT_BATCH_SIZE,
    ContentOptions,
    DataOptions,
    ProcessDataOptions,
    RowOptions,
    ValidationOptions,
)
from mini_trainer.options.fields import (
    Options,
    flag_name,
    flatten_options,
    group_options,
    iterate_fields,
    list_types,
    parse_duration,
    parse_rate,
    parse_shard,
    parse_steps,
    parse_subset,
    parse_template_args,
    replace_options,
)
from mini_trainer.options.learning import (
    SCHEDULES_WITH_END,
    ClassificationOptions,
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
from mini_trainer.options.tools import (
    BoardOptions,
    ContinualOptions,
    EngineOptions,
    EvaluateOptions,
    ExportGgufOptions,
    GenerateOptions,
    ImportConfigOptions,
    MergeAdapterOptions,
    MergeModelsOptions,
    PlotOptions,
    SamplingOptions,
    ScoreDataOptions,
    SweepOptions,
    VerifyOptions,
)
from mini_trainer.options.training import (
    DATA_SETS,
    MAY_DIFFER,
    PATH_OPTIONS,
    PRESETS,
    WITHOUT_NUMBERS,
    TrainOptions,
    list_data_sets,
    list_defaults,
    list_identifying_options,
    list_preset_values,
    list_shared_options,
    list_unchangeable_options,
    names_raw_data,
)
