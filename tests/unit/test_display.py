"""Pictures of meshes: every text is in them, boxes line up, markup is escaped."""

import re
from html.parser import HTMLParser

import pytest

from keras_mirror.demo.mesh_picture import bytes_text, rows_by_device
from keras_mirror.display import mesh_html, mesh_text, to_ascii


def names_and_lines(count):
    devices = [f"cpu:{index}" for index in range(count)]
    return devices, [[f"rows {8 * index}", "full copy"] for index in range(count)]


class _Texts(HTMLParser):
    """Collects the texts of a document and checks that its tags are balanced."""

    def __init__(self, document):
        super().__init__()
        self.texts, self.tags, self._open = [], [], []
        self.feed(document)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_text_of_two_devices_is_this_picture():
    assert mesh_text(["cpu:0", "gpu:11"], [["rows 0-3"], ["rows 4-7", "more"]]) == (
        "replica axis: 2 devices\n"
        "┌─ cpu:0 ──┐ ┌─ gpu:11 ─┐\n"
        "│ rows 0-3 │ │ rows 4-7 │\n"
        "│          │ │ more     │\n"
        "└──────────┘ └──────────┘"
    )


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 16, 63, 64])
def test_text_wraps_into_rows_of_eight_boxes_of_one_size(count):
    devices, held = names_and_lines(count)
    lines = mesh_text(devices, held).splitlines()
    tops = [line for line in lines if line.startswith("┌")]
    per_row = [top.count("┌") for top in tops]
    full, rest = divmod(count, 8)
    assert per_row == [8] * full + [rest] * (rest > 0)
    assert re.findall(r"cpu:\d+", "".join(tops)) == devices
    boxes = [len(line) for line in lines if line.startswith(("┌", "│", "└"))]
    assert len(set(boxes)) == len(set(per_row))


def test_text_fits_the_columns_of_the_terminal():
    devices, held = names_and_lines(8)
    for columns in (30, 80, 100):
        picture = mesh_text(devices, held, columns=columns)
        assert max(map(len, picture.splitlines())) <= columns
    # Too narrow for one box: still one box a row rather than none.
    assert mesh_text(devices, held, columns=1).count("┌") == 8


def test_text_of_devices_that_hold_nothing_is_an_empty_box():
    assert mesh_text(["cpu:0"], [[]]).splitlines()[1:] == ["┌─ cpu:0 ─┐", "└─────────┘"]


def test_text_keeps_the_box_whole_whatever_a_line_holds():
    picture = mesh_text(["cpu:0"], [["one\ntwo\tthree\x1b[31m", "x" * 200, "変数"]])
    heading, top, *body, bottom = picture.splitlines()
    assert "one two three [31m" in body[0]
    assert body[1].startswith("│ " + "x" * 39 + "…")
    # Two columns for each of the two wide characters.
    assert [len(line) for line in body] == [len(top), len(top), len(top) - 2]


def test_ascii_picture_keeps_its_shape():
    picture = to_ascii(mesh_text(["cpu:0"], [["rows 0-3", "é"]]))
    assert picture.splitlines()[1:] == [
        "+- cpu:0 --+",
        "| rows 0-3 |",
        "| ?        |",
        "+----------+",
    ]


@pytest.mark.parametrize("count", [1, 8, 9, 64])
def test_html_has_every_text_once_and_at_most_eight_columns(count):
    devices, held = names_and_lines(count)
    document = mesh_html(devices, held, axis_name="batch")
    found = _Texts(document)
    inside = [text for pair in zip(devices, held, strict=True) for text in pair]
    expected = [
        text for item in inside for text in ([item] if item in devices else item)
    ]
    assert found.texts[0].startswith(f"batch axis: {count} device")
    assert found.texts[1:] == expected
    assert f"repeat({min(count, 8)}," in document


def test_html_escapes_names_lines_and_axis():
    evil = "<script>alert('x')</script>\"&"
    found = _Texts(mesh_html([evil], [[evil]], axis_name=evil))
    assert set(found.tags) == {"div"}
    assert found.texts == [f"{evil} axis: 1 device", evil, evil]


def test_html_is_self_contained_and_takes_the_pages_text_color():
    document = mesh_html(["cpu:0"], [["rows 0-3"]])
    for outside in ("<style", "<script", "http", "class=", "src="):
        assert outside not in document
    assert "currentColor" in document
    assert not re.search(r"(?<!-)\bcolor:", document)


@pytest.mark.parametrize("draw", [mesh_text, mesh_html])
def test_lengths_that_differ_are_refused(draw):
    with pytest.raises(ValueError, match="Received: 2 devices, 1 lists"):
        draw(["cpu:0", "cpu:1"], [["rows"]])


@pytest.mark.parametrize(
    ("batch_rows", "num_devices", "expected"),
    [
        (32, 4, ["rows 0-7", "rows 8-15", "rows 16-23", "rows 24-31"]),
        (10, 4, ["rows 0-2", "rows 3-5", "rows 6-8", "row 9"]),
        (2, 4, ["row 0", "row 1", "padding alone", "padding alone"]),
        (5, 4, ["rows 0-1", "rows 2-3", "row 4", "padding alone"]),
    ],
)
def test_rows_of_the_batch_are_divided_in_order(batch_rows, num_devices, expected):
    assert rows_by_device(batch_rows, num_devices) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (38_920, "38.9 kB"),
        (407_080, "407 kB"),
        (999_499, "999 kB"),
        (999_501, "1.00 MB"),
        (99_960_000, "100 MB"),
        (12_500_000_000, "12.5 GB"),
    ],
)
def test_bytes_are_written_with_three_digits(count, expected):
    assert bytes_text(count) == expected
