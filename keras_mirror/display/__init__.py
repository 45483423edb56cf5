"""Pictures of meshes for notebooks and terminals, made from plain data."""

from keras_mirror.display.notebook import mesh_html as mesh_html
from keras_mirror.display.tables import bars_html as bars_html
from keras_mirror.display.tables import bytes_text as bytes_text
from keras_mirror.display.tables import table_html as table_html
from keras_mirror.display.tables import table_text as table_text
from keras_mirror.display.terminal import mesh_text as mesh_text
from keras_mirror.display.terminal import to_ascii as to_ascii
