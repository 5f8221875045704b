// There is no assembly here: see handleConfig.
