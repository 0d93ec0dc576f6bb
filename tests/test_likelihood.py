"""Choices by likelihood against EleutherAI's harness, and the harness's own tasks from files."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from evaluations import HARNESS_ROWS, evaluate_here, list_means, write_task
from forked import run_forked
from heavy import need
from processes import flags
from tiny_data import write_jsonl
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mini_trainer.continual.checking import find_harness_problems
from mini_trainer.continual.settings import SetSettings
from mini_trainer.data.rows.prompts import Prompt
from mini_trainer.distributed.ending import RunError
from mini_trainer.options.tools import EngineOptions, SamplingOptions
from mini_trainer.use.evaluation.likelihood import encode_choices, score_choices
from mini_trainer.use.evaluation.task_files import describe_task_file
from mini_trainer.use.inference.hf_engine import HFEngine
from mini_trainer.use.inference.loading import find_answering_model

need("lm_eval")

CPU = torch.device("cpu")
WORDS = ["the", "answer", "is", "four", "Question:", "Answer:", "A", "B", "no", "twelve", "12", "a,b", "naïve"]
SPECIAL = ["<s>", "</s>", "<unk>"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:END{% endif %}"
)


def train(tokenizer: Tokenizer, trainer: type, **options: object) -> Tokenizer:
    texts = [" ".join(random.Random(i).choices(WORDS, k=12)) for i in range(200)]
    tokenizer.train_from_iterator(texts, trainer(vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, **options))
    return tokenizer


def byte_level() -> Tokenizer:
    """As GPT-2: merges begin with a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [*"abcdefghijklmnopqrstuvwxyzABQ0123456789,:", "Ġ", "Ċ", "ĉ", "Ã", "¯"]
    return train(tokenizer, trainers.BpeTrainer, initial_alphabet=alphabet)


def sentencepiece() -> Tokenizer:
    """As Llama 2: a text begins with a space of its own, and merges with spaces in front."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = train(tokenizer, trainers.BpeTrainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return train(tokenizer, trainers.UnigramTrainer, unk_token="<unk>")


def words_alone() -> Tokenizer:
    """Spaces are no tokens."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return train(tokenizer, trainers.WordLevelTrainer)


TOKENIZERS = dict(byte_level=byte_level, sentencepiece=sentencepiece, unigram=unigram, words_alone=words_alone)


def open_engine(path: Path, tokenizer: Tokenizer, *, template: str | None = None) -> HFEngine:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )
    wrapped.save_pretrained(save_model(FAMILIES["llama"], path))
    found = find_answering_model(str(path))
    return HFEngine(found, EngineOptions(batch_size=4, dtype="float32"), SamplingOptions(), device=CPU)


def ask_harness(engine: HFEngine, pairs: list[tuple[str, str]], **options: object) -> list[float]:
    """The harness's log-likelihoods."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=engine.model, tokenizer=engine.tokenizer, batch_size=4, **options)
    requests = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in pairs]
    return [value for value, _ in model.loglikelihood(requests, disable_tqdm=True)]


def adds_tokens(engine: HFEngine, prompt: Prompt) -> bool:
    """Whether all choices add a token; where one only makes the prompt's last token longer, the harness fails."""
    lengths = [len(engine.tokenizer(text)["input_ids"]) for text in (prompt.text + c for c in prompt.choices)]
    if min(lengths) > len(engine.tokenizer(prompt.text.rstrip())["input_ids"]):
        return True
    with pytest.raises(ValueError, match=r"choice \d+ adds no token"):
        encode_choices(prompt, 0, engine)
    return False


def make_prompts(seed: int, count: int) -> list[Prompt]:
    chosen = random.Random(seed)
    prompts = []
    for _ in range(count):
        text = " ".join(chosen.choices(WORDS, k=chosen.randint(1, 6))) + chosen.choice(
            ["", " ", "  ", "\n", " \n", "\t"]
        )
        starts = ["", " "] if text[-1].isspace() else [" ", "\n"]
        choices = tuple(
            chosen.choice(starts) + " ".join(chosen.choices(WORDS, k=chosen.randint(1, 3))) for _ in range(3)
        )
        prompts.append(Prompt(row={}, text=text, choices=choices, right_choice=0))
    return prompts


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_choices_after_any_text_are_scored_as_the_harness_scores_them(kind, world, tmp_path):
    engine = open_engine(tmp_path, TOKENIZERS[kind]())
    prompts = [prompt for prompt in make_prompts(0, 60) if adds_tokens(engine, prompt)]
    assert len(prompts) > 30
    ours = [value for values in score_choices(engine, prompts, world) for value in values]
    theirs = ask_harness(engine, [(prompt.text, choice) for prompt in prompts for choice in prompt.choices])
    assert ours == pytest.approx(theirs, abs=1e-4)


def test_choices_without_a_prompt_follow_the_token_that_begins_a_text(world, tmp_path):
    for kind in ("byte_level", "sentencepiece"):
        engine = open_engine(tmp_path / kind, TOKENIZERS[kind]())
        prompt = Prompt(row={}, text="", choices=("the answer", "no"), right_choice=0)
        theirs = ask_harness(engine, [("", choice) for choice in prompt.choices])
        assert score_choices(engine, [prompt], world)[0] == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("end", ["", " ", "\n", "\n\n", " \n"])
def test_choices_of_a_chat_are_scored_after_its_rendered_text(end, world, tmp_path):
    engine = open_engine(tmp_path, byte_level(), template=TEMPLATE.replace("END", end))
    messages = [{"role": "user", "content": "the answer is"}]
    prompt = Prompt(row={}, messages=messages, choices=("A", " B", "twelve no"), right_choice=0)
    text = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    theirs = ask_harness(engine, [(text, choice) for choice in prompt.choices])
    assert score_choices(engine, [prompt], world)[0] == pytest.approx(theirs, abs=1e-4)


def test_a_choice_that_joins_the_prompts_last_word_is_reported(world, tmp_path, caplog):
    engine = open_engine(tmp_path, byte_level())
    prompt = Prompt(row={}, text="the a", choices=("nswer is four", " is"), right_choice=0)
    assert [one.joins for one in encode_choices(prompt, 0, engine)] == [True, False]
    score_choices(engine, [prompt], world)
    assert "1 of 2 choices" in caplog.text


@pytest.mark.slow
def test_choices_that_join_their_prompt_are_counted_over_all_ranks(tmp_path):
    """The second prompt is rank 1's."""
    model = tmp_path / "model"
    open_engine(model, byte_level())
    rows = [
        dict(prompt="the", choices=[" a", " is"], answer=0),
        dict(prompt="the a", choices=["nswer is four", " is"], answer=1),
    ]
    write_jsonl(tmp_path / "task.jsonl", rows)
    words = flags(model=model, task=tmp_path / "task.jsonl", output_dir=tmp_path / "out", dtype="float32")
    found = []
    for num_ranks in (2, 1):
        done = run_forked(num_ranks, "evaluate_model.py", *words)
        assert done.returncode == 0, done.stderr
        assert "1 of 4 choices" in done.stderr
        kept = tmp_path / "out" / "samples" / "model" / "task.choices.jsonl"
        values = [json.loads(line) for line in kept.read_text().splitlines()]
        found.append([value for line in values for value in line])
        shutil.rmtree(tmp_path / "out")
    assert found[0] == pytest.approx(found[1], abs=1e-5)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return str(save_tokenizer(save_model(FAMILIES["llama"], tmp_path_factory.mktemp("harness") / "base")))


@pytest.mark.wide
@pytest.mark.parametrize(("ours", "theirs"), [(" ", " "), ("", " "), ("\n", "\n")])
def test_a_task_and_the_same_task_of_the_harness_agree(ours, theirs, world, base, tmp_path):
    """The delimiter begins the choices, or ends the prompt; a task's name is not its file's."""
    file = write_task(tmp_path / "lm", name="tiny_choice", file="other.yaml", delimiter=theirs.replace("\n", "\n\n"))
    rows = [
        dict(prompt=row["q"] + (" " if ours == "" else ""), choices=[ours + c for c in row["c"]], answer=row["a"])
        for row in HARNESS_ROWS
    ]
    write_jsonl(tmp_path / "same.jsonl", rows)
    same, harness = evaluate_here(
        world, tmp_path / "out", model=base, task=str(tmp_path / "same.jsonl"), lm_eval=str(file)
    )["sets"]
    assert (harness["name"], harness["num_samples"]) == ("tiny_choice", 3)
    by_name, own = list_means(harness), list_means(same)
    assert (by_name["acc"], by_name["acc_norm"]) == (own["choice"], own["choice_normalised"])


@pytest.mark.wide
def test_groups_of_tasks_are_measured_one_by_one(world, base, tmp_path):
    write_task(tmp_path / "lm", name="first", file="a.yaml")
    write_task(tmp_path / "lm", name="second", file="b.yaml", delimiter="")
    group = tmp_path / "lm" / "g.yaml"
    group.write_text("group: both\ntask: [first, second]\naggregate_metric_list:\n  - metric: acc\n")
    sets = evaluate_here(world, tmp_path / "out", model=base, lm_eval=str(group))["sets"]
    assert [one["name"] for one in sets] == ["first", "second"]
    group.write_text("group: both\ntask: [first]\n")
    with pytest.raises(ValueError, match=r"lm_eval\.json: .*differently"):
        evaluate_here(world, tmp_path / "out", model=base, lm_eval=str(group))


@pytest.mark.wide
def test_a_task_whose_file_has_changed_is_not_answered_from_before(world, base, tmp_path):
    file = write_task(tmp_path / "lm", name="one", file="one.yaml")
    options = dict(model=base, lm_eval=str(file))
    first = evaluate_here(world, tmp_path / "out", **options)
    kept = tmp_path / "out" / "samples" / "base" / "lm_eval.json"
    written = kept.stat().st_mtime_ns
    assert evaluate_here(world, tmp_path / "out", **options) == first and kept.stat().st_mtime_ns == written
    file.write_text(file.read_text().replace("' '", "''"))
    with pytest.raises(ValueError, match=r"lm_eval\.json: .*differently"):
        evaluate_here(world, tmp_path / "out", **options)


def test_what_a_task_depends_on_is_known_by_content(tmp_path):
    """Every file that the harness reads for the task changes its description, and no other does."""
    file = write_task(tmp_path / "lm", name="one", file="one.yaml")
    with file.open("a") as opened:
        opened.write("process_docs: !function scripts.clean.drop\n")
    (tmp_path / "lm" / "scripts").mkdir()
    module = tmp_path / "lm" / "scripts" / "clean.py"
    module.write_text("def drop(docs):\n    return docs\n")
    group = tmp_path / "lm" / "g.yaml"
    group.write_text("group: all\ntask: [one, {group: inner, task: [arc_easy]}]\n")
    before = describe_task_file(group)
    assert (before["name"], before["others"]) == ("all", ["arc_easy", "inner"])
    (tmp_path / "lm" / "unrelated.yaml").write_text("task: other\n")
    assert describe_task_file(group) == before
    for path in (file, module, group, tmp_path / "lm" / "common.yml", tmp_path / "lm" / "rows.jsonl"):
        path.write_text(path.read_text() + "\n")
        after = describe_task_file(group)
        assert after != before, path
        before = after


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("task: [a, b]\n", "'task' is a list"),
        ("doc_to_text: x\n", "neither a 'task'"),
        ("- a\n", "'key: value'"),
        ("task: [a\n", "line 2: .*valid YAML"),
        ("task: a\ndoc_to_text: !unknown x\n", "'!unknown'"),
        ("include: [sub.yaml]\n", r"sub\.yaml: line 1: .*alias"),
        ("include: x.yaml\n", "includes itself"),
        ("include: none.yaml\n", r"none\.yaml: "),
    ],
)
def test_files_that_define_no_task_are_refused(text, reason, world, base, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    (tmp_path / "sub.yaml").write_text("task: &a [*a]\n")
    with pytest.raises(ValueError, match=f"--lm-eval .*{reason}"):
        evaluate_here(world, tmp_path / "out", model=base, lm_eval=str(tmp_path / "x.yaml"))


def test_unknown_tasks_are_refused_before_a_model_is_looked_for(world, tmp_path):
    reason = r"--lm-eval gsm9k: not a task or group of lm_eval [\d.]+; did you mean gsm8k\b"
    with pytest.raises(ValueError, match=reason):
        evaluate_here(world, tmp_path / "out", model="no/such", lm_eval="gsm9k")
    (problem,) = find_harness_problems([SetSettings(name=name, lm_eval=name) for name in ("gsm8k", "gsm9k")])
    assert re.match(reason.replace("--lm-eval", "lm_eval:"), problem)


def test_answers_are_not_kept_for_another_chat_template(world, base, tmp_path):
    tokenizer = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    (tmp_path / "task.jsonl").write_text(json.dumps(dict(question="Hi", answer="Ho")) + "\n")
    options = dict(model=str(tokenizer), task=str(tmp_path / "task.jsonl"), max_new_tokens=2)
    evaluate_here(world, tmp_path / "out", **options)
    template = tokenizer / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "ASSISTANT"))
    with pytest.raises(RunError, match=r"other settings .*chat_template"):
        evaluate_here(world, tmp_path / "out", **options)
