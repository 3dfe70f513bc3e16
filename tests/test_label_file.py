"""Tables of labels that a person has edited, as ``data.labels`` reads them."""

import pytest

from fineprune.datasets.label_file import DROP, read_labels
from fineprune.errors import InputError


@pytest.fixture
def read(tmp_path):
    """Writes a table, and returns the labels that are read from it."""

    def read(text, classes=("a", "b"), keys=None, encoding="utf-8"):
        (tmp_path / "labels.csv").write_text(text, encoding=encoding)
        return read_labels(tmp_path / "labels.csv", list(classes), 2, keys)

    return read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one column for each of label in the first line .*, got none"),
        ("index,class\n0,a\n", "expected one column for each of label .*, got index, class"),
        ("index,label,label\n0,a,b\n1,a,b\n", "one column for each of label and index"),
        ("label\na\nb\n", "expected an index of 0 to 1, or a key, in line 2 of .*, got ''"),
        ("index,label\n0,a\n", "expected one row for each of 2 images in .*, got 0 rows for index"),
        ("index,label\n0,a\n0,b\n1,a\n", "expected one row .*, got 2 rows for index 0"),
        ("index,label\n0,a\n2,b\n", "an index of 0 to 1, or a key, in line 3 .*, got '2'"),
        ("index,label\n0,a\n-1,b\n", "an index of 0 to 1, or a key, in line 3 .*, got '-1'"),
        ("index,label\n0,a\n1,bee\n", "line 3 .* it may be a, b, drop"),
        ("index,label\n0,a\n1\n", "expected 2 values in line 3 of .*, as in its first line, got 1"),
        ("index,label\n\n0,a\n1,\n", "line 4 .*, got '': it may be a, b, drop"),
        ("index,label\n0,a\n1,dorp\n", "got 'dorp': did you mean 'drop'?"),
    ],
)
def test_a_wrong_table_is_refused(text, message, read):
    with pytest.raises(InputError, match=message):
        read(text)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (("crane", "dog", "crane"), r"a unique name for each class .*'crane' more than"),
        (("a", "drop"), "expected no class that is named 'drop'"),
    ],
)
def test_ambiguous_names_are_refused(classes, message, read):
    with pytest.raises(InputError, match=message):
        read("index,label\n0,drop\n1,a\n", classes)


def test_a_table_in_another_encoding_says_what_to_do(read):
    with pytest.raises(InputError, match=r"cannot read it: .*: save it as UTF-8"):
        read("index,label\n0,a\n1,b\n", encoding="utf-16")


@pytest.mark.parametrize(
    "text",
    [
        '\ufeffscore,label,index\n1, b ,1\n"2",0,0\n',  # any order, and other columns
        "index;label\n0;a\n1;b\n",  # the separators of a spreadsheet
        "index\tlabel\n0\ta\n1\tb\n",
        "index,label,note\n0,a,\n,,\n1,b,\n,,\n",  # rows of separators alone
    ],
)
def test_a_table_may_be_written_by_a_spreadsheet(text, read):
    assert read(text).tolist() == [0, 1]


def test_the_word_that_leaves_a_sample_out_may_have_capitals_unless_a_class_is_named_so(read):
    text = "index,label\n0,a\n1,Drop\n"
    assert read(text).tolist() == [0, DROP]
    assert read(text, ["a", "Drop"]).tolist() == [0, 1]


def test_samples_are_found_by_their_keys(read):
    assert read("key,label\nb,drop\na,1\n", "xy", ("a", "b")).tolist() == [1, DROP]
    # Systems write letters with accents in different ways.
    text = "key,label\ncafe\u0301.png,u\u0308\nb,y\n"
    assert read(text, "y\u00fc", ("caf\u00e9.png", "b")).tolist() == [1, 0]
