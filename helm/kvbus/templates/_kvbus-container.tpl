{{- /*
kvbus as a native sidecar: started before the engine, ended after it.

All three probes ask kvbus about kvbus. A sidecar's readiness is the Pod's readiness, and its startup gates the engine's start:
none of them may depend on the engine or on the health of its stream.
*/ -}}
{{- define "kvbus.container" -}}
name: kvbus
image: {{ include "kvbus.image" (dict "image" .Values.kvbus.image "default" .Chart.AppVersion) }}
imagePullPolicy: {{ .Values.kvbus.image.pullPolicy }}
restartPolicy: Always
args: [run, -c, /etc/kvbus/kvbus.yaml]
env:
  {{- if eq .Values.kvbus.profile "llm-d" }}
  - name: POD_IP
    valueFrom:
      fieldRef:
        fieldPath: status.podIP
  - name: KVBUS_WORKER
    value: $(POD_IP):{{ .Values.engine.httpPort }}
  {{- else }}
  - name: KVBUS_WORKER
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  {{- end }}
ports:
  - name: kvbus-http
    containerPort: {{ .Values.kvbus.ports.http }}
startupProbe:
  httpGet: {path: /livez, port: kvbus-http}
  periodSeconds: 1
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /livez, port: kvbus-http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: kvbus-http}
  periodSeconds: 5
  timeoutSeconds: 5
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.kvbus.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - name: kvbus-config
    mountPath: /etc/kvbus
    readOnly: true
{{- end -}}
