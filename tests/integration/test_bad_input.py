"""Mistakes end every rank with one clear line, before a model is built."""

from jobs import CONFIGS, run, run_warm, write_data


def arguments(data, model, output, *more):
    common = ["--model", model, "--train-data", data, "--output", output, "--epochs", 1]
    return [*common, "--deepspeed_config", CONFIGS / "fp32.json", *more]


def assert_refused(result, *words):
    assert result.status != 0 and result.seconds < 60
    assert len(result.errors) == 1, result.output
    for word in words:
        assert word in result.errors[0]
    assert "Traceback" not in result.output


def test_L6_a_global_batch_beyond_the_data_is_refused(folder, fixtures, model):
    data = write_data(folder / "few" / "few", [(fixtures / "img" / "rgb.jpg").read_bytes()] * 63)
    job = arguments(data, model, folder / "l6", "--batch-size", 32)
    assert_refused(run_warm(*job, log=folder / "l6.log"), "63 records", "64", "2 ranks")


def test_help_lists_the_flags_and_is_no_failure(folder):
    result = run("--help", log=folder / "help.log", launcher="alone")
    assert result.status == 0 and "--keep-every" in result.output and "Traceback" not in result.output


def test_C7_a_resume_from_nowhere_is_refused(folder, data, model):
    job = arguments(data, model, folder / "c7", "--batch-size", 8, "--resume", "/no/such")
    assert_refused(run(*job, log=folder / "c7.log"), "--resume /no/such")


def test_a_run_whose_only_save_was_edited_by_hand_is_never_started_afresh(folder, data, model):
    output = folder / "edited"
    state = output / "checkpoints" / "step_00000003" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"format": 3, "position": {"step": 3}, "files": {}}')
    job = arguments(data, model, output, "--batch-size", 8, "--resume", "auto")
    result = run_warm(*job, log=folder / "edited.log")
    assert_refused(result, "none of the 1 checkpoints", "step_00000003")
    assert "state.json was changed after it was written" in result.output


def test_N1_a_misspelt_hostfile_is_refused(folder, data, model):
    job = arguments(data, model, folder / "n1", "--batch-size", 8)
    result = run(*job, log=folder / "n1.log", hostfile="no_such_hosts")
    assert result.status != 0
    assert result.errors and all("the hostfile no_such_hosts does not exist" in line for line in result.errors)
