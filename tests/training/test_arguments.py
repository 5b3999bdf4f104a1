import pytest

from rwkv_clip.cli import main
from rwkv_clip.errors import UserError
from rwkv_clip.training.arguments import build_parser, caption_weights, parse_arguments
from rwkv_clip.training.other_flags import OTHER_FLAGS

NEEDED = ["--model", "RWKV-CLIP-Nano", "--train-data", "data", "--output", "run"]


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_arguments([*NEEDED, *words])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_given_flags_are_told_from_the_defaults():
    args = parse_arguments([*NEEDED, "--lr", "1e-3"])
    assert args.lr == 1e-3 and args.beta2 == 0.98
    assert "lr" in args.given and "beta2" not in args.given


def test_the_deepspeed_launcher_s_local_rank_is_accepted():
    assert parse_arguments(["--local_rank=3", *NEEDED, "--deepspeed"]).local_rank == 3


def test_a_missing_flag_is_named():
    with pytest.raises(UserError, match="--train-data"):
        parse_arguments(["--model", "x", "--output", "y"])


def test_a_misspelt_flag_that_is_required_is_answered_with_the_near_one():
    with pytest.raises(UserError, match="unknown argument '--modell'; did you mean --model?"):
        parse_arguments(["--modell=Nano", "--output", "o"])


@pytest.mark.parametrize(
    ("words", "near"),
    [(["plan", "--modell", "Nano"], "did you mean --model?"), (["export", "a", "b", "--quite"], "see --help")],
)
def test_a_command_s_unknown_flag_is_answered_before_what_is_missing(capsys, words, near):
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: unknown argument '{words[-2 if 'plan' in words else -1]}'; {near}\n"


@pytest.mark.parametrize("flag", ["--model", "--train-data", "--output", "--resume", "--pretrained", "--val-data"])
def test_an_empty_path_is_refused_since_it_would_mean_the_working_folder(flag):
    assert f"{flag}: is empty" in refusal(flag, "")


def test_a_misspelt_flag_is_answered_with_the_near_one():
    assert "did you mean --epochs?" in refusal("--epoch", "3")


@pytest.mark.parametrize("flag", OTHER_FLAGS)
def test_O11_a_flag_of_another_trainer_is_refused_with_its_replacement(flag):
    assert f"{flag} is not used here: {OTHER_FLAGS[flag]}" == refusal(flag, "1")
    assert flag not in build_parser()._option_string_actions
    own = [word.strip(",") for word in OTHER_FLAGS[flag].split() if word.startswith("--")]
    assert set(own) <= set(build_parser()._option_string_actions)


def test_a_flag_of_another_trainer_is_answered_before_what_is_missing_without_it():
    with pytest.raises(UserError, match="--name is not used here: use --output"):
        parse_arguments(["--model", "x", "--train-data", "y", "--name=first"])


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--epochs", "0"),
        ("--lr", "0"),
        ("--lr", "nan"),
        ("--batch-size", "2.5"),
        ("--beta2", "1"),
        ("--lr-minimum", "1.5"),
        ("--drop-path-rate", "-0.1"),
        ("--precision", "int8"),
        ("--lr-schedule", "cosin"),
        ("--zero-stage", "4"),
        ("--lr", "inf"),
        ("--warmup", "inf"),
        ("--shuffle-window", "100000000000000000000"),
        ("--workers", "100000"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_flag_and_the_value(flag, value):
    message = refusal(flag, value)
    assert flag in message and value in message


@pytest.mark.parametrize(
    "words",
    [
        ["--lock-image", "--lock-text"],
        ["--pretrained", "w.pt", "--resume", "run/checkpoints/step_00000001"],
        ["--eval-every", "10"],
    ],
)
def test_flags_that_contradict_one_another_are_refused(words):
    assert words[0] in refusal(*words)


def test_pretrained_goes_with_automatic_resume():
    assert parse_arguments([*NEEDED, "--pretrained", "w.pt", "--resume", "auto"]).pretrained == "w.pt"


NAMES = ["raw", "synthetic", "generated"]


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        (None, None),
        ("1,1,2", [1, 1, 2]),
        ("generated=2,raw=1", [1, 0, 2]),
        ("raw=1,synthetic=1,generated=0.5", [1, 1, 0.5]),
    ],
)
def test_caption_weights_come_in_the_data_s_order(text, weights):
    assert caption_weights(text, NAMES) == weights


@pytest.mark.parametrize("text", ["1,1", "0,0,0", "-1,1,1", "raw=x", "alt=1", "1,raw=2,3", "nan,1,1"])
def test_caption_weights_that_do_not_fit_are_refused(text):
    with pytest.raises(UserError, match="--caption-weights"):
        caption_weights(text, NAMES)


@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_rate_for_a_locked_tower_is_refused(tower):
    words = ["--model", "m", "--train-data", "d", "--output", "o", f"--lock-{tower}"]
    with pytest.raises(UserError, match=f"--lock-{tower} keeps the tower that --{tower}-lr-factor is for"):
        parse_arguments([*words, f"--{tower}-lr-factor", "0.5"])
    parse_arguments(words)
