from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from kinfed.data.partitions import make_federation
from kinfed.data.sources import load_source
from kinfed.data.sources.table_files import is_table, read_table
from kinfed.errors import ConfigError, DataError

CSV = """who,age,income,label,kind,part
ann,30,1.5,yes,phone,train
ann,40,2.5,no,phone,train
bob,50,3.5,yes,laptop,train
bob,60,4.5,no,laptop,val
bob,70,100.5,maybe,laptop,test
ann,80,-100.5,no,phone,test
"""
ROLES = {"label_column": "label", "client_column": "who", "group_column": "kind", "split_column": "part"}


@pytest.fixture
def csv(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text(CSV)
    return str(file)


def federation(name, options, partition="column", clients=None, **more):
    return make_federation(load_source(name, options=options), partition, clients, more)


def test_a_table_becomes_its_clients(csv):
    f = federation(csv, ROLES)
    assert f.names == ["ann", "bob"]
    assert f.class_names == ["maybe", "no", "yes"]
    assert f.labels.tolist() == [2, 1, 2, 1, 0, 1]
    assert [part.tolist() for part in f.train.lists()] == [[0, 1], [2]]
    assert [part.tolist() for part in f.val.lists()] == [[], [3]]
    assert [part.tolist() for part in f.test.lists()] == [[5], [4]]
    assert f.groups.tolist() == [1, 0]
    assert f.group_names == ["laptop", "phone"]
    assert f.features.shape == (2,)
    assert f.description["dataset_options"]["client_column"] == "who"


def test_features_are_scaled_by_training_rows_alone(csv):
    f = federation(csv, ROLES)
    age = f.features.gather(torch.arange(6))[:, 0]
    deviation = np.std([30, 40, 50])
    np.testing.assert_allclose(age, [(a - 40) / deviation for a in (30, 40, 50, 60, 70, 80)], rtol=1e-6)
    raw = federation(csv, ROLES | {"standardize": False})
    assert raw.features.gather(torch.arange(2)).tolist() == [[30.0, 1.5], [40.0, 2.5]]


def test_without_marks_each_client_is_divided(csv):
    f = federation(csv, {"label_column": "label", "client_column": "who", "ignore": "kind, part"}, test_fraction=0.34)
    assert f.train.count.tolist() == [1, 1]
    assert f.test.count.tolist() == [2, 2]
    assert f.val.count.tolist() == [0, 0]


def test_a_table_without_clients_can_be_shared_out(csv):
    options = {"label_column": "label", "ignore": ["who", "kind", "part"]}
    f = federation(csv, options, "iid", 3)
    assert f.num_clients == 3
    assert sorted(torch.cat([f.train.rows, f.test.rows]).tolist()) == list(range(6))
    with pytest.raises(ConfigError, match="client_column"):
        federation(csv, options)


def test_other_partitions_say_that_validation_marks_are_lost(csv):
    f = federation(csv, ROLES, "iid", 2)
    assert any("does not keep the validation marks" in note for note in f.notes)
    assert f.test.rows.sort().values.tolist() == [4, 5], "test marks are kept"


def test_some_clients_can_be_chosen_or_left_out(csv):
    one = federation(csv, {**ROLES, "columns": "age=category,income=category"}, clients=1, min_size=2)
    assert one.num_clients == 1
    assert len(one.group_names) == 1
    large = federation(csv, ROLES, min_size=2)
    assert large.names == ["ann"]
    assert any("1 of 2 clients have fewer than 2 training examples" in note for note in large.notes)
    with pytest.raises(ConfigError, match=r"3 clients asked for.*has 2 with"):
        federation(csv, ROLES, clients=3)
    with pytest.raises(DataError, match=r"no client of .* has 9 training examples"):
        federation(csv, ROLES, min_size=9)


def test_parquet_reads_like_csv(csv, tmp_path):
    import pyarrow.csv

    file = tmp_path / "table.parquet"
    pq.write_table(pyarrow.csv.read_csv(csv), file)
    a, b = federation(csv, ROLES), federation(str(file), ROLES)
    assert torch.equal(a.features.raw, b.features.raw)
    assert torch.equal(a.labels, b.labels)
    assert torch.equal(a.train.rows, b.train.rows)


def test_tab_separated_and_number_types(tmp_path):
    file = tmp_path / "table.tsv"
    file.write_text("x\tflag\ty\n1\ttrue\t10\n2\tfalse\t9\n3\ttrue\t10\n")
    source = load_source(str(file), options={"label_column": "y"})
    assert source.class_names == ["9", "10"], "numbers in order of size"
    assert source.features.raw.tolist() == [[1, 1], [2, 0], [3, 1]]


def test_na_can_be_a_name(tmp_path):
    file = tmp_path / "T.CSV"
    file.write_text("x,c,y\n1,NA,a\n2,DE,null\n")
    source = load_source(str(file), options={"label_column": "y", "client_column": "c"})
    assert source.owner_names == ["DE", "NA"]
    assert source.class_names == ["a", "null"]


def test_whole_real_labels_are_classes(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("x,y\n1,2.0\n2,0.0\n")
    assert load_source(str(file), options={"label_column": "y"}).class_names == ["0", "2"]


@pytest.mark.parametrize("kind", ["struct", "bytes", "path"])
def test_images_in_a_table(tmp_path, kind):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 4)).astype(np.uint8)
    cells = []
    for i, one in enumerate(pixels):
        buffer = io.BytesIO()
        Image.fromarray(one).save(buffer, "PNG")
        (tmp_path / f"{i}.png").write_bytes(buffer.getvalue())
        cells.append(
            {"struct": {"bytes": buffer.getvalue(), "path": None}, "bytes": buffer.getvalue(), "path": f"{i}.png"}[kind]
        )
    file = tmp_path / "t.parquet"
    pq.write_table(pa.table({"picture": cells, "y": ["a", "b"], "extra": [1, 2]}), file)
    source = load_source(str(file), options={"label_column": "y", "image_column": "picture"})
    assert torch.equal(source.features.raw[:, 0], torch.from_numpy(pixels))
    assert float(source.features.gather(torch.arange(2)).max()) <= 1
    if kind != "path":
        plain = federation(str(file), {"label_column": "y"}, "iid", 1, test_fraction=0.0)
        assert any("picture holds images" in note and "image_column" in note for note in plain.notes)


def load_text(tmp_path, text, **options):
    file = tmp_path / "t.csv"
    file.write_text(text)
    return load_source(str(file), options={"label_column": "y"} | options)


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        ("a,y\n1,0\n2,1\n", {"label_column": None}, ConfigError, "--label-column; columns: a, y"),
        ("age,y\n1,0\n", {"label_column": "aeg"}, ConfigError, "no column 'aeg'; did you mean age"),
        ("a,y\n1,0\n", {"client_column": "zzz"}, ConfigError, "client_column: .* has no column 'zzz'; It has a, y"),
        ("a,y\n1,0\n", {"ignore": "b"}, ConfigError, "ignore: .* has no column 'b'"),
        ("a,y\n1,0\n", {"client_column": "y"}, ConfigError, "one role only"),
        ("a,g,y\n1,0,1\n", {"group_column": "g"}, ConfigError, "needs client_column"),
        ("a,y\n", {}, DataError, "no rows"),
        ("", {}, DataError, "cannot read .* as CSV"),
        ("a,y\n1,0\n2,1,3\n", {}, DataError, "cannot read .* as CSV"),
        ("a,a,y\n1,2,0\n", {}, DataError, "several columns named a"),
        ("a,y\n1,0\n2,0\n", {}, DataError, "one class only .0.* give rows of another"),
        ("a,y\n1,\n2,\n", {}, DataError, "column y .* is empty in all 2 rows"),
        ("a,y\n1,0.5\n2,1\n", {"task": "classification"}, DataError, "column y should hold classes; entry 0 is 0.5"),
        ("a,y\n1,0\n1e60,1\n", {}, DataError, "column a .*row 2"),
        ("a,y\n1,0\n2,1\n", {"columns": "b=number"}, ConfigError, "columns: .* has no column 'b'"),
        ("a,y\n1,0\n2,1\n", {"columns": "a=numbr"}, ConfigError, "did you mean number"),
        ("a,y\n1,0\n2,1\n", {"columns": "a"}, ConfigError, "age=number,zip=category; got 'a'"),
        ("a,y\n1,0\n2,1\n", {"columns": "y=number"}, ConfigError, "y is declared a feature, and has another role"),
        ("a,y\nx,0\ny,1\n", {"columns": "a=number"}, DataError, "declared a number, and no training row holds one"),
        ("a,y\n7,0\n7,1\n", {}, DataError, r"no feature columns left: a has the same value in all training rows"),
        ("y\n0\n1\n", {}, DataError, "no feature columns left"),
        ("a,s,y\n1,train,0\n2,hold,1\n", {"split_column": "s"}, DataError, "train, val or test; it also says hold"),
        ("a,c,y\n1,x,0\n2,,1\n", {"client_column": "c"}, DataError, "column c .* 1 empty cell.*row 2"),
        ("a,c,y\n1,x,0\n2,  ,1\n", {"client_column": "c"}, DataError, "column c .* 1 empty cell.*row 2"),
        ("a,c,y\n1,x,0\n2,,1\n", {"client_colum": "c"}, ConfigError, "did you mean client_column"),
        (
            "a,c,g,y\n1,x,u,0\n2,x,v,1\n",
            {"client_column": "c", "group_column": "g"},
            DataError,
            "one value per client; client x has u, v",
        ),
    ],
)
def test_bad_tables_are_explained(tmp_path, text, options, error, message):
    with pytest.raises(error, match=message):
        load_text(tmp_path, text, **options)


def test_a_client_with_test_rows_only_is_left_out_and_noted(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("a,c,s,y\n1,x,train,0\n4,x,train,0\n2,x,test,1\n3,z,test,0\n")
    f = federation(str(file), {"label_column": "y", "client_column": "c", "split_column": "s"})
    assert f.names == ["x"]
    assert any("1 of 2 clients" in note for note in f.notes)


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.csv does not exist"):
        load_source(str(tmp_path / "nothing.csv"))
    bad = tmp_path / "bad.parquet"
    bad.write_text("no parquet")
    with pytest.raises(DataError, match=r"cannot read .* as Parquet"):
        load_source(str(bad), options={"label_column": "y"})


def test_what_counts_as_a_table():
    assert is_table("a/b.csv")
    assert is_table("B.PARQUET")
    assert not is_table("mnist")


# ---- files as people export them ----


def test_a_spreadsheets_csv_is_read_as_it_is(tmp_path):
    """Byte order mark, semicolons, decimal commas, Windows line ends."""
    file = tmp_path / "excel.csv"
    rows = [
        "site;dose;age;cost;day",
        "a;-0,289;61;99,5;01.02.2024",
        "b;1,250;NA;100;29.2.2024",
        'a;"0,5";47;98,25;3.12.2023',
    ]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    table = read_table(file)
    assert table.column_names == ["site", "dose", "age", "cost", "day"]
    assert table["dose"].to_pylist() == [-0.289, 1.25, 0.5]
    assert table["age"].to_pylist() == [61, None, 47]
    source = load_source(str(file), options={"label_column": "cost", "client_column": "site"})
    assert source.problem.is_regression
    assert source.labels.tolist() == [99.5, 100, 98.25]
    days = source.table.cells["day"].as_days()
    assert days.tolist() == [19754, 19782, 19694]


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        (['"1,5"', '"2,25"'], [1.5, 2.25]),
        (['"1,234"', '"2,500"'], None),  # a thousand and some, or one and a bit
        (['"1,5"', '"2.5"'], None),
        (['"1,5"', "north"], None),
    ],
)
def test_commas_become_points_where_they_can_be_nothing_else(tmp_path, cells, numbers):
    file = tmp_path / "t.csv"
    file.write_text("a,y\n" + "\n".join(f"{cell},1" for cell in cells))
    values = read_table(file)["a"].to_pylist()
    assert values == (numbers if numbers is not None else [cell.strip('"') for cell in cells])


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_the_first_line_says_what_separates_cells(tmp_path, separator):
    file = tmp_path / "t.csv"
    file.write_text(separator.join(['"age, in years"', "b", "c"]) + "\n" + separator.join("123") + "\n")
    assert read_table(file).column_names == ["age, in years", "b", "c"]


def test_files_that_are_no_tables_say_what_to_do(tmp_path):
    (tmp_path / "a.xlsx").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"is a workbook.*save its sheet as CSV in UTF-8"):
        read_table(tmp_path / "a.xlsx")
    (tmp_path / "latin.csv").write_bytes("size,y\ngroß,1\nklein,0\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"column size of .*latin\.csv holds texts that are not UTF-8; say which"):
        read_table(tmp_path / "latin.csv")


def test_what_looks_like_something_else_is_said(tmp_path):
    source = load_text(
        tmp_path,
        "seen,born,price,code,c,y\n01/02/2024,1.2.1950,$5,250.8,north,no\n2024-02-29,03.12.1961,$7,V45,North,yes\n"
        "3/2/2024,30.11.1944,$8,300,south,No\n",
        client_column="c",
    )  # fmt: skip
    notes = " ".join(source.notes)
    assert "column seen looks like dates ('01/02/2024') but is taken as text; write all of them as 2024-02-29" in notes
    assert "column price looks like numbers ('$5')" in notes
    assert "column code" not in notes
    assert "column born" not in notes, "these are dates"


def test_names_have_no_blanks_around_them(tmp_path):
    source = load_text(tmp_path, "a,c,y\n1,north,0\n2, north,1 \n3,north ,1\n", client_column="c")
    assert source.owner_names == ["north"]
    assert source.class_names == ["0", "1"]


def test_rows_without_a_label_are_left_out_and_said(tmp_path):
    (tmp_path / "t.csv").write_text("a,y\n1,no\n2, \n3,yes\n4,\n5,no\n")
    source = load_source(str(tmp_path / "t.csv"), None, 0, {"label_column": "y"})
    assert source.labels.tolist() == [0, 1, 0]
    assert source.features.raw[:, 0].tolist() == [1.0, 3.0, 5.0]
    assert "2 of 5 rows have no value in column y and are left out" in source.notes


def test_a_column_that_makes_clients_of_single_rows_is_doubted(tmp_path):
    rows = "".join(f"{n},{n % 2},c{n}\n" for n in range(60))
    (tmp_path / "t.csv").write_text("a,y,c\n" + rows)
    data = make_federation(
        load_source(str(tmp_path / "t.csv"), None, 0, {"label_column": "y", "client_column": "c"}), "column", None
    )
    finding = next(finding for finding in data.findings if finding.name == "small_clients")
    assert finding.text == "half of the 60 clients have at most 1 row(s); is c the column that names them?"
