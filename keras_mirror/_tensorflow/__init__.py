"""What a strategy does on the TensorFlow backend, by way of tf.distribute.

Only `_engine` imports this package, and only where Keras runs on TensorFlow.
"""
