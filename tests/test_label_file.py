"""Tables of labels that a person has edited, as ``data.labels`` reads them."""

import pytest

from fineprune.datasets.label_file import DROP, read_labels
from fineprune.errors import InputError


def test_two_classes_with_one_name_are_refused(tmp_path):
    (tmp_path / "labels.csv").write_text("index,label\n0,crane\n1,dog\n")
    with pytest.raises(InputError, match=r"a unique name for each class .*'crane' more than"):
        read_labels(tmp_path / "labels.csv", ["crane", "dog", "crane"], 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one column for each of label in the first line .*, got none"),
        ("index,class\n0,a\n", "expected one column for each of label .*, got index, class"),
        ("label\na\nb\n", "expected an index of 0 to 1, or a key, in line 2 of .*, got ''"),
        (
            "index,index,label\n",
            "one column for each of label and index .*, got index, index, lab",
        ),
        ("index,label\n0,a\n", "expected one row for each of 2 images in .*, got 0 rows for index"),
        ("index,label\n0,a\n0,b\n1,a\n", "expected one row .*, got 2 rows for index 0"),
        (
            "index,label\n0,a\n2,b\n",
            "an index of 0 to 1, or a key, in line 3 .*, got '2'",
        ),
        (
            "index,label\n0,a\n-1,b\n",
            "an index of 0 to 1, or a key, in line 3 .*, got '-1'",
        ),
        ("index,label\n0,a\n1,bee\n", "line 3 .* it may be a, b, drop"),
        ("index,label\n0,a\n1\n", "expected 2 values in line 3 of .*, as in its first line, got 1"),
        ("index,label\n\n0,a\n1,\n", "line 4 .*, got '': it may be a, b, drop"),
        ("index,label\n0,a\n1,dorp\n", "got 'dorp': did you mean 'drop'?"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, text, message):
    path = tmp_path / "labels.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_labels(path, ["a", "b"], 2)


def test_a_table_may_be_in_any_order_and_have_other_columns(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text('\ufeffscore,label,index\n1, b ,1\n"2",0,0\n', encoding="utf-8")
    assert read_labels(path, ["a", "b"], 2).tolist() == [0, 1]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_table_may_have_the_separators_of_a_spreadsheet(separator, tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text(separator.join(("index", "label\n0", "a\n1", "b\n")))
    assert read_labels(path, ["a", "b"], 2).tolist() == [0, 1]


def test_rows_of_separators_alone_are_no_rows(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("index,label,note\n0,a,\n,,\n1,b,\n,,\n")
    assert read_labels(path, ["a", "b"], 2).tolist() == [0, 1]


def test_a_table_in_another_encoding_says_what_to_do(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("index,label\n0,a\n1,b\n", encoding="utf-16")
    with pytest.raises(InputError, match=r"cannot read it: .*: save it as UTF-8"):
        read_labels(path, ["a", "b"], 2)


def test_the_word_that_leaves_a_sample_out_may_have_capitals_unless_a_class_is_named_so(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("index,label\n0,a\n1,Drop\n")
    assert read_labels(path, ["a", "b"], 2).tolist() == [0, DROP]
    assert read_labels(path, ["a", "Drop"], 2).tolist() == [0, 1]


def test_a_dropped_sample_is_left_out_by_its_key(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("key,label\nb,drop\na,1\n")
    assert read_labels(path, ["x", "y"], 2, ("a", "b")).tolist() == [1, DROP]


def test_names_and_keys_may_have_another_unicode_form(tmp_path):
    """Systems write letters with accents in different ones."""
    path = tmp_path / "labels.csv"
    path.write_text("key,label\ncafe\u0301.png,u\u0308\nb,y\n", encoding="utf-8")
    assert read_labels(path, ["y", "\u00fc"], 2, ("caf\u00e9.png", "b")).tolist() == [1, 0]
