from diary import Diary, read_diary


def test_what_is_written_can_be_read_at_once(tmp_path):
    diary = Diary(tmp_path / "diary.jsonl")
    diary.write("loss", step=1, loss=2.5)
    diary.write("saved")
    assert read_diary(tmp_path / "diary.jsonl") == [{"event": "loss", "step": 1, "loss": 2.5}, {"event": "saved"}]


def test_half_a_last_line_is_left_out(tmp_path):
    path = tmp_path / "diary.jsonl"
    path.write_text('{"event": "loss", "step": 1}\n{"event": "lo')
    assert read_diary(path) == [{"event": "loss", "step": 1}]


def test_no_diary_is_an_empty_one(tmp_path):
    Diary(None).write("loss")
    assert read_diary(tmp_path / "none") == []
