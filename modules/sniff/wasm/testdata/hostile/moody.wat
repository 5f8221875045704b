;; section wayhouse.abi 00000100
;; Runs for ever on input that begins with L, traps on T, and else says that the key is ok.
(module
  (memory (export "memory") 1)
  (data (i32.const 0) "\04\02\00ok")
  (func (export "alloc") (param i32) (result i32) (i32.const 1024))
  (func (export "sniff") (param $in i32) (param i32 i32 i32) (result i64)
    (if (i32.eq (i32.load8_u (local.get $in)) (i32.const 76)) (then (loop $l (br $l))))
    (if (i32.eq (i32.load8_u (local.get $in)) (i32.const 84)) (then (unreachable)))
    (i64.const 5))
)
